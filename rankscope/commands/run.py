"""`rankscope run`: launch a training script or program as torchrun does, recorded without a change to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

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
    "rankscope run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 train.py"
)
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}
_RENDEZVOUS = ("--rdzv", "--master", "--standalone", "--nnodes", "--node-rank", "--node_rank")


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS OF TORCHRUN] SCRIPT|-m MODULE [ARGUMENTS]", help="The same as for torchrun."),
    ] = None,
) -> None:
    """Launch a training script as torchrun does, recorded and watched, without a change to it.

    All options of torchrun are passed on (--nproc-per-node, --nnodes, --rdzv-endpoint, --max-restarts, -m, ...). With
    --no-python it starts a program in any language and records its NCCL calls. In addition, --run-dir DIR sets the
    folder of the run and --run-name NAME its name. On one machine no rendezvous options are needed.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as torchrun

    from analyzers.report.terminal.safe_console import SafeConsole
    from probes.attach.parent_death import VARIABLE as LAUNCHER_PID
    from trainer.launcher.script.followed_run import FollowedRun
    from trainer.launcher.script.recorded_agent import recorded

    words = [*(arguments or [])]
    parser = get_args_parser()
    parser.prog = "rankscope run"
    parser.add_argument("--run-dir", default="", metavar="DIR")
    parser.add_argument("--run-name", default="", metavar="NAME")
    options = parser.parse_args(words)
    if not (options.module or options.no_python or os.path.isfile(options.training_script)):
        fail(f"{options.training_script}: no such script; name a file, or -m MODULE")
    own = words[: len(words) - len(options.training_script_args)]
    if not any(word.startswith(_RENDEZVOUS) for word in own):
        options.standalone = True
    os.environ[LAUNCHER_PID] = str(os.getpid())
    if options.run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = os.path.abspath(options.run_dir)
    if options.run_name:
        os.environ["RANKSCOPE_RUN_NAME"] = options.run_name
    _start_attached(options)
    sys.argv = [sys.argv[0], *words]
    launch: Callable[[argparse.Namespace], None] = torchrun  # torch does not annotate it
    followed = FollowedRun(SafeConsole(stderr=True))
    try:
        with followed, recorded(followed):
            launch(options)
    except ChildFailedError as error:
        if not followed.conclude(exit_code=1, reason="failed"):
            echo(f"rankscope: {_first_failure(error)}", err=True)
        raise typer.Exit(1) from None
    except SignalException as error:
        followed.conclude(exit_code=128 + int(error.sigval), reason="interrupted")
        raise typer.Exit(128 + int(error.sigval)) from None
    followed.conclude(exit_code=0, reason="finished")


def _start_attached(options: argparse.Namespace) -> None:
    """Have each rank start with `rankscope.attached_script`, which runs the script, or `rankscope.attached_program`."""
    if options.no_python:
        if options.module:
            fail("--no-python and -m exclude each other: a program or a module")
        options.training_script_args = [options.training_script, *options.training_script_args]
        options.training_script, options.module, options.no_python = "rankscope.attached_program", True, False
        return
    target = ["-m", options.training_script] if options.module else [options.training_script]
    options.training_script_args = [*target, *options.training_script_args]
    options.training_script, options.module = "rankscope.attached_script", True


def _first_failure(error: ChildFailedError) -> str:
    """The first rank that failed, as torch's elastic agent found it."""
    rank, failure = error.get_first_failure()
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    return f"rank {rank} ended with {how} before anything was recorded: its output is above"
