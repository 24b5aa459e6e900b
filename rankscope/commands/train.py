"""`rankscope train`: train a model over several ranks, recorded and watched."""

from __future__ import annotations

import contextlib
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from rankscope import __version__
from rankscope.terminal import console, echo, fail

__all__ = ["EPILOG", "too_old_torch", "train"]

OLDEST_TORCH = (2, 11)
"""Oldest supported torch, as in the extra `train` of pyproject.toml."""

EPILOG = (
    "\b\nExamples:\nrankscope train gpt-demo\n"
    "rankscope train my.toml --nproc-per-node 4 --set optim.lr=1e-3\n"
    "rankscope train --resume runs/latest --set train.steps=400\n"
    "rankscope train my.toml --fault nan_grad@step=40,rank=2"
)


def train(
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="TOML file or preset (gpt2-124m, ...). Default: the built-in settings."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one setting; repeatable.")
    ] = None,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", min=0, help="Ranks on this machine; 0 takes as many as the mesh needs.")
    ] = 0,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            "--fault",
            metavar="KIND@step=N,rank=R",
            help="Inject a fault; repeatable. `drill --list` names the kinds.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|ADDRESS",
            help="Resume a run that has ended, from its newest intact checkpoint. RUN: its folder. "
            "ADDRESS: `checkpoint.remote` with the run's name.",
        ),
    ] = None,
    nnodes: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Nodes of the run; MIN:MAX continues while at least MIN remain.")
    ] = "1",
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="Index of this node, from 0.")] = 0,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Rendezvous address, the same on all nodes.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="With --resume: resume even if the run is alive or the guard stopped it.")
    ] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Check all nodes first; train only if nothing failed.")
    ] = False,
) -> None:
    """Train a model over several ranks, with every rank recorded and watched.

    Exit codes: 0 finished, 1 failed, 2 wrong options, 3 stopped by the guard, 4 another launch has taken over the run,
    5 this node is excluded, 6 nothing to resume: the run has finished, 75 the disk is full or does not answer, 143
    stopped by SIGTERM with a checkpoint, 130 stopped by Ctrl-C with a checkpoint.
    """
    with contextlib.suppress(PackageNotFoundError):
        if problem := too_old_torch(version("torch")):
            fail(problem)
    if preflight:
        _check_first(nproc_per_node, nnodes, node_rank, rdzv_endpoint)
    from trainer.launcher.processes.zygote import one_thread

    if config_path is None and resume is None and not overrides:
        echo("No CONFIG was named: training a small built-in GPT. `rankscope train gpt-demo` names a preset.")
    with one_thread():  # ranks are forked from here
        from probes.tape.rundir import RunError
        from trainer.config.load import ConfigError
        from trainer.exit_codes import EXIT_FAILED, EXIT_FINISHED, EXIT_STORAGE, STORAGE_ERRNOS
        from trainer.faults.options import FaultError
        from trainer.launcher.node import NodeRendezvousError
        from trainer.launcher.processes.shortage import shortage
        from trainer.launcher.resume import FinishedError, ResumeError
        from trainer.launcher.start import Options, launch_run
        from trainer.presets import config_path as preset_or_file

    try:
        options = Options(
            config_path=config_path if config_path is None or resume is not None else preset_or_file(config_path),
            overrides=overrides or [],
            nproc=nproc_per_node,
            faults=faults or [],
            resume=resume,
            force=force,
            nnodes=nnodes,
            node_rank=node_rank,
            endpoint=rdzv_endpoint,
        )
        code = launch_run(options, version=__version__, console=console())
    except FinishedError as error:
        echo(f"rankscope: {error}", err=True)
        raise typer.Exit(EXIT_FINISHED) from None
    except (ConfigError, FaultError, NodeRendezvousError, ResumeError, RunError) as error:
        fail(str(error))
    except PermissionError as error:
        fail(f"{error.filename or 'a file of the run'}: {error.strerror}")
    except (OSError, RuntimeError) as error:
        if missing := shortage(error):
            echo(f"rankscope: {missing}, then try again.", err=True)
            raise typer.Exit(EXIT_FAILED) from None
        if not isinstance(error, OSError) or error.errno not in STORAGE_ERRNOS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        echo(f"rankscope: {where}{error.strerror}. Free or repair the disk, then try again.", err=True)
        raise typer.Exit(EXIT_STORAGE) from None
    raise typer.Exit(code)


def _check_first(nproc: int, nnodes: str, node_rank: int, endpoint: str) -> None:
    """Exit with 1 if a check of `rankscope preflight` fails."""
    from trainer.launcher.node import NodeRendezvousError
    from trainer.preflight.launching import launch_preflight, usual_ranks

    if nnodes != "1" and not endpoint:
        fail("--preflight over several nodes needs --rdzv-endpoint HOST:PORT, the same on all of them")
    nproc = nproc or usual_ranks()
    try:
        code = launch_preflight([], nproc=nproc, nnodes=nnodes, node_rank=node_rank, endpoint=endpoint)
    except NodeRendezvousError as error:
        fail(str(error))
    if code:
        echo("rankscope: not started: a check before the run failed. Without --preflight it starts anyway.", err=True)
        raise typer.Exit(1)


def too_old_torch(found: str) -> str:
    """Reason why the trainer does not run with this version of torch; empty if it does."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH:
        return ""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return f"rankscope train needs torch {oldest} or newer, and this is {found}; run and attach support older versions"
