"""`rankscope rebuild`: rebuild a run's store from its tapes."""

from __future__ import annotations

from rankscope.terminal import RunArgument, console, fail

__all__ = ["EPILOG", "rebuild"]

EPILOG = "Example:  rankscope rebuild runs/latest"


def rebuild(run: RunArgument) -> None:
    """Rebuild a run's store from its tapes, e.g. after it was deleted or damaged."""
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError
    from store import rebuild as rebuild_store

    try:
        folder = RunDir.open(run)
        result = rebuild_store(folder)
    except (RunError, StoreError) as error:
        fail(str(error))
    rows = sum(result.rows.values())
    console().print(
        f"{folder.store()}: {rows:,} rows from {len(list(folder.rank_dirs()))} rank folders", highlight=False
    )
