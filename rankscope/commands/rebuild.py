"""`rankscope rebuild`: rebuild a run's store from its tapes."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import RunArgument, console, fail

__all__ = ["EPILOG", "rebuild"]

EPILOG = "\b\nExample:\nrankscope rebuild runs/latest"


def rebuild(
    run: RunArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Also if rows are lost that the tapes no longer have; keeps the old store.")
    ] = False,
) -> None:
    """Rebuild a run's store from its tapes, e.g. after it was deleted or damaged.

    Exit code 2 and no change if the store has rows that the tapes no longer have.
    """
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError
    from store import rebuild as rebuild_store

    try:
        folder = RunDir.open(run)
        result = rebuild_store(folder, force=force)
    except (RunError, StoreError) as error:
        fail(str(error))
    rows = sum(result.rows.values())
    console().print(
        f"{folder.store()}: {rows:,} rows from {len(list(folder.rank_dirs()))} rank folders", highlight=False
    )
    for path in result.kept:
        console().print(f"The former store is kept as {path}.", highlight=False, soft_wrap=True)
    for name in result.problems:
        console().print(f"Records incomplete: {name}", highlight=False, soft_wrap=True)
