"""`rankscope run`: a training script or program, launched as torchrun does it and recorded without a line in it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import fail

if TYPE_CHECKING:
    import argparse

__all__ = ["CONTEXT", "EPILOG", "run"]

EPILOG = (
    "Examples:  rankscope run --nproc-per-node 4 train.py --lr 1e-3   |   "
    "rankscope run --nproc-per-node 8 -m my.package.train   |   "
    "rankscope run --run-dir runs/try-7 --nproc-per-node gpu --max-restarts 3 train.py   |   "
    "rankscope run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 train.py"
)
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["--help"]}
_MEETINGS = ("--rdzv", "--master", "--standalone", "--nnodes", "--node-rank", "--node_rank")


def run(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS OF TORCHRUN] SCRIPT|-m MODULE [ARGUMENTS]", help="As for torchrun."),
    ] = None,
) -> None:
    """Launch a training script as torchrun does, recorded and watched; the script stays as it is.

    Every option of torchrun is passed on (--nproc-per-node, --nnodes, --rdzv-endpoint, --max-restarts, -m, ...). With
    --no-python it is a program in any language, of which the calls of NCCL are recorded. Beside
    them --run-dir DIR names the run's folder and --run-name NAME the run. Ranks on one machine find each other by
    themselves.
    """
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as torchrun

    words = [*(arguments or [])]
    parser = get_args_parser()
    parser.prog = "rankscope run"
    parser.add_argument("--run-dir", default="", metavar="DIR")
    parser.add_argument("--run-name", default="", metavar="NAME")
    options = parser.parse_args(words)
    own = words[: len(words) - len(options.training_script_args)]
    if not any(word.startswith(_MEETINGS) for word in own):
        options.standalone = True
    if options.run_dir:
        os.environ["RANKSCOPE_RUN_DIR"] = os.path.abspath(options.run_dir)
    if options.run_name:
        os.environ["RANKSCOPE_RUN_NAME"] = options.run_name
    _through_us(options)
    sys.argv = [sys.argv[0], *words]
    torchrun(options)


def _through_us(options: argparse.Namespace) -> None:
    """Each rank starts with `rankscope.attached_script`, which runs the script, or `rankscope.attached_program`."""
    if options.no_python:
        if options.module:
            fail("--no-python runs a program, -m a module: give one of them")
        options.training_script_args = [options.training_script, *options.training_script_args]
        options.training_script, options.module, options.no_python = "rankscope.attached_program", True, False
        return
    target = ["-m", options.training_script] if options.module else [options.training_script]
    options.training_script_args = [*target, *options.training_script_args]
    options.training_script, options.module = "rankscope.attached_script", True
