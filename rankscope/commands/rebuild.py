"""`rankscope rebuild`: rebuild a run's store from its tapes."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import FormatOption, RunArgument, console, fail, print_json, wants_json

__all__ = ["EPILOG", "rebuild"]

EPILOG = "\b\nExample:\nrankscope rebuild runs/latest"


def rebuild(
    run: RunArgument,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Rebuild even if this loses rows that only the old store has; the old store is kept."
        ),
    ] = False,
    output: FormatOption = "text",
) -> None:
    """Rebuild a run's store from its tapes, e.g. after it was deleted or damaged.

    If the store has rows that the tapes no longer have, nothing changes and the exit code is 2.
    """
    as_json = wants_json(output)
    from analyzers.wording import counted
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError
    from store import rebuild as rebuild_store

    try:
        folder = RunDir.open(run)
        result = rebuild_store(folder, force=force)
    except (RunError, StoreError) as error:
        fail(str(error))
    if as_json:
        kept = [str(path) for path in result.kept]
        counts = {"store": str(folder.store()), "rows": dict(result.rows), "kept": kept}
        print_json(counts | {"problems": list(result.problems)})
        return
    rows = counted(sum(result.rows.values()), "row") or "0 rows"
    folders = counted(len(list(folder.rank_dirs())), "rank folder") or "0 rank folders"
    console().print(f"{folder.store()}: {rows} from {folders}", highlight=False)
    for path in result.kept:
        console().print(f"The former store is kept as {path}.", markup=False, highlight=False, soft_wrap=True)
    for name in result.problems:
        console().print(f"Records incomplete: {name}", markup=False, highlight=False, soft_wrap=True)
