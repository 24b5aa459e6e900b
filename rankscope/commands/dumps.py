"""`rankscope dumps`: fetch the flight-recorder dumps of a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probes.tape.typed_path import analyze_command
from rankscope.terminal import LONGEST_S, FormatOption, console, echo, fail, print_json, wants_json

__all__ = ["EPILOG", "dumps"]

EPILOG = (
    "\b\nExamples:\nrankscope dumps http://head-node:25999 --into dumps\n"
    "rankscope dumps localhost:25999 --into dumps && rankscope analyze dumps"
)


def dumps(
    address: Annotated[str, typer.Argument(metavar="URL", help="Address of the debug server on rank 0.")],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Folder for one file per rank.")],
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1.0, max=LONGEST_S, help="Time to wait for an answer, in seconds.")
    ] = 90.0,
    output: FormatOption = "text",
) -> None:
    """Fetch the flight-recorder dumps of a running or hung job, for `rankscope analyze`.

    The job needs `torch.distributed.debug.start_debug_server()`, and no probes. Changes nothing in it.
    Exit codes: 0 every rank answered, 1 some did not, 2 none did.
    """
    as_json = wants_json(output)
    from store.readers.dumps.debug_server import DebugServerError, fetch_dumps

    try:
        fetched = fetch_dumps(address, into, timeout_s=timeout_s)
    except (DebugServerError, OSError) as error:
        fail(str(error))
    for rank, why in sorted(fetched.silent.items()):
        echo(f"rankscope: rank {rank} did not answer: {why}", err=True)
    if as_json:
        silent = {str(rank): why for rank, why in sorted(fetched.silent.items())}
        print_json({"folder": str(into), "ranks": sorted(fetched.ranks), "silent": silent})
        raise typer.Exit(1 if fetched.silent else 0)
    what = f"{len(fetched.ranks)} rank{'s' * (len(fetched.ranks) != 1)}"
    line = f"{into}: dumps of {what}. Now: {analyze_command(into)}"
    console().print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if fetched.silent else 0)
