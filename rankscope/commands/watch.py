"""`rankscope watch`: record and supervise a run on this node."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import RunArgument

__all__ = ["EPILOG", "watch"]

EPILOG = "Example:  rankscope watch runs/latest"


def watch(
    run: RunArgument,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="Index of this node.")] = 0,
) -> None:
    """Record and supervise a run that trains on this node (`train` starts it by itself)."""
    from trainer.recovery.watch import main as watch_main

    raise typer.Exit(watch_main([str(run), "--node-rank", str(node_rank)]))
