"""Bring the stores of a run up to date before they are read.

with ExitStack() as scratch:
    paths = stores_up_to_date(run, scratch, wait_s=10.0)
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from probes.tape.attempts import all_ended
from probes.tape.files.safe_open import file_problem
from probes.tape.rundir import RunDir
from probes.tape.unwritten import restore_unwritten
from store.database import POLL_S, READER, StoreCorruptError, StoreError, StoreLockedError, connect_attached, is_watched
from store.ingest.ingest import Ingester
from store.ingest.rank_folders import Folder, folders_by_node

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

__all__ = ["stores_up_to_date"]

FINAL_POLL_S = 5.0
MAX_COPY_BYTES = 512 << 20
"""Maximum size of a store that a reader copies while `watch` is writing it."""


def stores_up_to_date(
    run: RunDir, scratch: contextlib.ExitStack, wait_s: float, *, include_newest: bool = False
) -> list[Path]:
    """Bring every node's store up to date; returns the files to read.

    `include_newest`: while `watch` is running, copy the store temporarily and ingest the records that it lacks into the
    copy.
    """
    restore_unwritten(run.event_files())
    paths: dict[Path, Path] = {path: path for path in run.stores()}
    for node, folders in folders_by_node(run).items():
        path = run.store(node)
        try:
            paths[path] = _catch_up_node(run, node, folders, wait_s)
        except StoreLockedError:
            if include_newest and (found := _copy_with_newest(run, node, folders, scratch, wait_s)) is not None:
                paths[path] = found
                continue
            if not path.exists() and not _appears(path, wait_s):
                raise
            paths[path] = path
            # If `watch` does not finish, it is slow, was stopped, or waits for the next attempt.
            if all_ended(run) and not _watch_finishes(path):
                paths[path] = _scratch_copy(run, node, folders, scratch, fresh=True)
        except StoreCorruptError:
            raise
        except StoreError:  # the folder is read-only, or other readers keep the file open
            paths[path] = _scratch_copy(run, node, folders, scratch)
    return [paths[path] for path in sorted(paths, key=lambda path: (len(path.name), path.name))]


def _catch_up_node(run: RunDir, node: int, folders: Sequence[Folder], wait_s: float) -> Path:
    with Ingester(run, node, role=READER, threads=2, wait_s=wait_s, folders=folders) as ingester:
        ingester.catch_up()
        return ingester.path


def _watch_finishes(path: Path) -> bool:
    """Wait until the `watch` of an ended run has ingested the last records and has exited. A verdict without these
    records would be incomplete. Returns False if it takes longer than `FINAL_POLL_S`.
    """
    deadline = time.monotonic() + FINAL_POLL_S
    while is_watched([path]):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _copy_with_newest(
    run: RunDir, node: int, folders: Sequence[Folder], scratch: contextlib.ExitStack, wait_s: float
) -> Path | None:
    """Copy a store that `watch` is writing, and ingest the newest records into the copy. Returns None if the store is
    too large or unreadable.
    """
    path = run.store(node)
    with contextlib.suppress(StoreError):
        if not path.exists():
            return _scratch_copy(run, node, folders, scratch, fresh=True)
        if path.stat().st_size <= MAX_COPY_BYTES:
            # While the file is open here, no writer can open it. So the file and its write-ahead log are consistent.
            held = connect_attached({"held": path}, wait_s=wait_s)
            return _scratch_copy(run, node, folders, scratch, held=held)
    return None


def _scratch_copy(
    run: RunDir,
    node: int,
    folders: Sequence[Folder],
    scratch: contextlib.ExitStack,
    *,
    fresh: bool = False,
    held: DuckDBPyConnection | None = None,
) -> Path:
    """Create a temporary store with all records of the tapes.

    `fresh`: build it from the tapes alone, because the store is being written. `held`: a connection that keeps writers
    out; it is closed once the store is copied.
    """
    folder = Path(scratch.enter_context(TemporaryDirectory(prefix="rankscope-")))
    original, copy = run.store(node), folder / run.store(node).name
    for suffix in () if fresh else (".wal", ""):  # database last: closing a file releases the locks on it
        source = original.with_name(original.name + suffix)
        if source.exists() and not file_problem(source):
            shutil.copyfile(source, copy.with_name(copy.name + suffix))
    if held is not None:
        held.close()
    try:
        with Ingester(run, node, threads=2, store_path=copy, folders=folders) as ingester:
            ingester.catch_up()
    except StoreError as error:  # name the run's file, not its copy
        raise type(error)(str(error).replace(str(copy), str(original))) from None
    return copy


def _appears(path: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
