"""`rankscope dumps`: fetch the flight-recorder dumps of a job that hangs now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import console, fail

__all__ = ["EPILOG", "dumps"]

EPILOG = (
    "Examples:  rankscope dumps http://head-node:25999 --into dumps   |   "
    "rankscope dumps localhost:25999 --into dumps && rankscope analyze dumps"
)


def dumps(
    address: Annotated[str, typer.Argument(metavar="URL", help="Where rank 0 of the job opened its server.")],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Folder for one file a rank.")],
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1.0, help="How long to wait for an answer.")] = 90.0,
) -> None:
    """Fetch the flight-recorder dumps of a job that runs or hangs now, for `rankscope analyze`.

    The job needs `torch.distributed.debug.start_debug_server()`, and nothing of ours. Changes nothing in it.
    Exit codes: 0 every rank answered, 1 some did not, 2 nothing came.
    """
    from store.readers.debug_server import DebugServerError, fetch_dumps

    try:
        fetched = fetch_dumps(address, into, timeout_s=timeout_s)
    except (DebugServerError, OSError) as error:
        fail(str(error))
    for rank, why in sorted(fetched.silent.items()):
        typer.echo(f"rankscope: rank {rank} did not answer: {why}", err=True)
    what = f"{len(fetched.ranks)} rank{'s' * (len(fetched.ranks) != 1)}"
    console().print(f"{into}: dumps of {what}. Now: rankscope analyze {into}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if fetched.silent else 0)
