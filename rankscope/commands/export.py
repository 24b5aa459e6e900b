"""`rankscope export`: a checkpoint's weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import console, fail

__all__ = ["EPILOG", "export"]

EPILOG = (
    "Examples:  rankscope export runs/latest --out model.safetensors   |   "
    "rankscope export runs/latest/checkpoints/step-00000050 --out model.safetensors"
)


def export(
    path: Annotated[Path, typer.Argument(help="A run's folder, or that of a checkpoint.", metavar="RUN|CHECKPOINT")],
    out: Annotated[Path, typer.Option("--out", help="File to write, replaced if it is there.", metavar="FILE")],
    step: Annotated[int | None, typer.Option("--step", help="Step; without it, the newest good one.")] = None,
) -> None:
    """Write a checkpoint's whole weights into a safetensors file, after all its hashes were checked."""
    from trainer.checkpoint.export import export as export_weights
    from trainer.checkpoint.export import find_checkpoint
    from trainer.checkpoint.manifest import CheckpointError

    try:
        done = export_weights(find_checkpoint(path, step=step), out)
    except CheckpointError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{out}: cannot be written: {error.strerror}")
    what = f"{done.num_parameters:,} parameters in {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB"
    console().print(f"{out}: step {done.step} of {done.folder}: {what}", highlight=False, soft_wrap=True)
