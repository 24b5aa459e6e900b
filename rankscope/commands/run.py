"""`rankscope run`: launch an unchanged training script or program as torchrun does, and record it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from rankscope.terminal import echo, fail

if TYPE_CHECKING:
    import argparse

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["CONTEXT", "EPILOG", "run"]

EPILOG = (
    "\b\nExamples:\nrankscope run --nproc-per-node 4 train.py --lr 1e-3\n"
    "rankscope run --nproc-per-node 8 -m my.package.train\n"
    "rankscope run --run-dir runs/try-7 --nproc-per-node gpu --max-restarts 3 train.py\n"
    "rankscope run --set publish.address=s3://lake/runs --nproc-per-node 8 train.py\n"
    "rankscope run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 train.py"
)
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}
_ONE_VALUE = ("--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts", "--run-dir", "--run-name", "--set")
_DEVICES = ("cpu", "gpu", "auto", "xpu")
_RENDEZVOUS = ("--rdzv", "--master", "--standalone", "--nnodes", "--node-rank", "--node_rank")


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS OF TORCHRUN] SCRIPT|-m MODULE [ARGUMENTS]", help="The same as for torchrun."),
    ] = None,
) -> None:
    """Launch a training script as torchrun does, recorded and watched, without changing it.

    All options of torchrun are passed on (--nproc-per-node, --nnodes, --rdzv-endpoint, --max-restarts, -m, ...). With
    --no-python it starts a program in any language and records its NCCL calls. In addition, --run-dir DIR sets the
    folder of the run, --run-name NAME the beginning of its name (NAME-DATE-TIME), and --set SECTION.KEY=VALUE
    (repeatable) a setting of recording or `watch` (sections: probes, profiler, recovery, metrics, alerts, otel,
    publish, trackers). On one machine no rendezvous options are needed.
    """
    words = [*(arguments or [])]
    _refuse_before_torch(words)
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import run as torchrun

    from analyzers.report.terminal.safe_console import SafeConsole
    from probes.attach.attached_config import VARIABLE as ATTACH_CONFIG
    from probes.attach.launch.parent_death import VARIABLE as LAUNCHER_PID
    from trainer.launcher.loopback_store import torch_stores_on_loopback
    from trainer.launcher.nodes.method_names import name_methods_cheaply
    from trainer.launcher.script.followed_run import FollowedRun
    from trainer.launcher.script.recorded_agent import recorded
    from trainer.launcher.stop_signals import StopSignals

    options = _parsed(words)
    if not options.no_python:
        _refuse_unrunnable(options.training_script, is_module=options.module)
    if options.run_dir:
        _refuse_no_run(Path(options.run_dir))
    if options.overrides:
        os.environ[ATTACH_CONFIG] = json.dumps(_checked(options.overrides))
    launch_options = words[: len(words) - len(options.training_script_args)]
    if not any(word.startswith(_RENDEZVOUS) for word in launch_options):
        options.standalone = True
    if options.standalone:  # the rendezvous stores listen on loopback, so the ranks must connect there
        options.local_addr = options.local_addr or "localhost"
    os.environ[LAUNCHER_PID] = str(os.getpid())
    if options.run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = os.path.abspath(options.run_dir)
    if options.run_name:
        os.environ["RANKSCOPE_RUN_NAME"] = options.run_name
    _await_rendezvous(options)
    _start_attached(options)
    name_methods_cheaply()
    sys.argv = [sys.argv[0], *words]
    launch: Callable[[argparse.Namespace], None] = torchrun  # torch does not annotate it
    followed = FollowedRun(SafeConsole(stderr=True))

    def stopped(number: int) -> SignalException:
        return SignalException(f"signal {number}", sigval=signal.Signals(number))

    with StopSignals(followed, grace_s=followed.grace_s) as stop:
        stop.listen()
        try:
            with (
                followed.following(stop),
                recorded(followed, stop, many_nodes=_max_nodes(options) > 1),
                torch_stores_on_loopback() if options.standalone else contextlib.nullcontext(),
                stop.raising(stopped),
            ):
                launch(options)
        except ChildFailedError as error:
            if not followed.conclude(exit_code=1, reason="failed"):
                echo(f"rankscope: {_first_failure(error)}", err=True)
            raise typer.Exit(1) from None
        except (RendezvousError, DistError) as error:
            echo(f"rankscope: {_lost_rendezvous(options, error)}", err=True)
            followed.conclude(exit_code=1, reason="failed")
            raise typer.Exit(1 if followed.has_started else 2) from None
        except (ValueError, socket.gaierror) as error:
            if followed.has_started:
                raise
            fail(" ".join(str(error).split()))  # torchrun refuses an option, or this host has no address
        except SignalException as error:
            followed.conclude(exit_code=128 + int(error.sigval), reason="interrupted")
            stop.end_process(128 + int(error.sigval))
            raise typer.Exit(128 + int(error.sigval)) from None
        followed.conclude(exit_code=0, reason="finished")


def _refuse_before_torch(words: list[str]) -> None:
    """Refuse the most common mistakes at once: importing torch takes up to a minute on a busy machine.

    It reads only options that it knows to take one value; `_parsed` checks all.
    """
    if not words:
        fail("name a script: rankscope run --nproc-per-node 4 train.py")
    rest = [*words]
    while rest and rest[0].partition("=")[0].replace("_", "-") in _ONE_VALUE:
        name, sign, value = rest.pop(0).partition("=")
        if not sign and rest:
            value = rest.pop(0)
        if name[2:7] == "nproc" and value and not _is_number_of_ranks(value):
            fail(f"{name} {value}: give a number of ranks, or one of {', '.join(_DEVICES)}")
    if rest and not rest[0].startswith("-") and not os.path.isfile(rest[0]):
        _fail_without_script(rest[0])


def _fail_without_script(path: str) -> NoReturn:
    what = "is a folder" if os.path.isdir(path) else "no such script"
    fail(f"{path}: {what}; name a file, or -m MODULE")


def _is_number_of_ranks(text: str) -> bool:
    """True for any word if a package adds a device type to torch, because only torch knows that type's name."""
    from importlib.metadata import entry_points

    return text.isdigit() or text in _DEVICES or bool(entry_points(group="torch.backends"))


def _parsed(words: list[str]) -> argparse.Namespace:
    """Parse the options of torchrun and Rankscope; exits with one line if one of them is wrong."""
    from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

    parser = get_args_parser()
    parser.prog = "rankscope run"
    parser.add_argument("--run-dir", default="", metavar="DIR")
    parser.add_argument("--run-name", default="", metavar="NAME")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):  # argparse prints a page of usage before its error
            options: argparse.Namespace = parser.parse_args(words)
    except SystemExit as ended:
        if not ended.code:
            raise
        mistake = message.getvalue().strip().rpartition(": error: ")[2].replace(", training_script_args", "")
        fail(f"{mistake.replace('training_script', 'SCRIPT')}. See `rankscope run --help`.")
    try:
        is_usable = determine_local_world_size(options.nproc_per_node) > 0
    except ValueError as error:
        fail(f"--nproc-per-node {options.nproc_per_node}: {str(error).rstrip('.')}; give a number of ranks")
    if not is_usable:
        fail(f"--nproc-per-node {options.nproc_per_node}: give a number of ranks, 1 or more")
    try:
        parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError):
        fail(f"--nnodes {options.nnodes}: must be a number of nodes, or MIN:MAX")
    return options


def _refuse_unrunnable(target: str, *, is_module: bool) -> None:
    """Exit with code 2 if every rank would fail before the first line of the script."""
    from trainer.launcher.script.startable import module_problem, script_problem

    if is_module:
        if problem := module_problem(target):
            fail(f"-m {target}: {problem}")
    elif not os.path.isfile(target):
        _fail_without_script(target)
    elif problem := script_problem(Path(target)):
        fail(f"{target}: {problem}")


def _refuse_no_run(folder: Path) -> None:
    from probes.tape.rundir import RunDir, RunError

    try:
        RunDir.is_new(folder)
    except (RunError, OSError) as error:
        fail(f"--run-dir {error}")


def _await_rendezvous(options: argparse.Namespace) -> None:
    """Wait until the node that hosts the rendezvous listens; exits with code 2 if it does not."""
    from trainer.launcher.node import NodeRendezvousError
    from trainer.launcher.nodes.endpoint import await_torchrun

    if options.standalone or options.rdzv_backend != "c10d" or not options.rdzv_endpoint:
        return
    try:
        await_torchrun(options.rdzv_endpoint, options.rdzv_conf)
    except NodeRendezvousError as error:
        fail(str(error))


def _max_nodes(options: argparse.Namespace) -> int:
    from torch.distributed.run import parse_min_max_nnodes

    return int(parse_min_max_nnodes(options.nnodes)[1])


def _checked(overrides: list[str]) -> dict[str, dict[str, Any]]:
    """The settings of `--set` as JSON types. Exits if one is invalid or belongs to the trainer."""
    from probes.attach.attached_config import SECTIONS
    from trainer.config.load import ConfigError, given_settings

    try:
        given = given_settings(overrides)
    except ConfigError as error:
        fail(str(error))
    if others := sorted(set(given) - set(SECTIONS)):
        fail(f"--set {others[0]}....: only `rankscope train` has this section; a script has {', '.join(SECTIONS)}")
    return given


def _start_attached(options: argparse.Namespace) -> None:
    """Make each rank start `rankscope.attached_script`, which runs the script, or `rankscope.attached_program`."""
    if options.no_python:
        if options.module:
            fail("--no-python and -m are mutually exclusive: name a program or a module")
        options.training_script_args = [options.training_script, *options.training_script_args]
        options.training_script, options.module, options.no_python = "rankscope.attached_program", True, False
        return
    target = ["-m", options.training_script] if options.module else [options.training_script]
    options.training_script_args = [*target, *options.training_script_args]
    options.training_script, options.module = "rankscope.attached_script", True


def _lost_rendezvous(options: argparse.Namespace, error: Exception) -> str:
    """Error of a failed rendezvous in one line, without the C++ stack in torch's message."""
    where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    text = str(error.__cause__ or error).partition("\nException raised from")[0]
    return f"--rdzv-endpoint {where}: no rendezvous with the other nodes: {' '.join(text.split())[:200]}"


def _first_failure(error: ChildFailedError) -> str:
    """Describe the first failed rank, as found by torch's elastic agent."""
    from probes.tape.signal_names import signal_name

    rank, failure = error.get_first_failure()
    how = signal_name(failure.exitcode) or f"exit code {failure.exitcode}"
    return f"rank {rank} ended with {how} before anything was recorded: its output is above"
