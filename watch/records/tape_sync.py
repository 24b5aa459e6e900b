"""Fsync tapes and events every few seconds, and record their checksums, in a thread of `watch`.

    with TapeSync(run, node_rank=0, every_s=5.0).running():
        ...
    # on exit: syncs all files of the node once more
    syncing.finish()             # after the last event

A killed process loses nothing that it wrote to a tape, but a power cut loses what the kernel has not written to disk
yet. Fsync in this process also covers what the ranks have stored through their memory mappings, so the ranks never wait
for the disk. A sync starts `every_s` seconds after the start of the previous one, or after a slow one, a quarter of
`every_s` after its end. A power cut loses the records of about one such interval. A rank that has just started is
synced at once, since its records cannot be judged without its identity, and events are synced before tapes. The
checksums in the index reveal losses and alterations (`probes.tape.segment_index`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.files.safe_open import sync_file
from probes.tape.rundir import NODE_RANK, RunDir
from probes.tape.segment_index import INDEX_NAME, SegmentIndex
from store.ingest.rank_folders import Folder, NodeFolders
from watch.background_loop import background_loop

__all__ = ["TapeSync"]

logger = logging.getLogger("rankscope.watch")
INDEX_EVERY_S = 30.0
STARTS_POLL_S = 0.25
LIVE_SEGMENTS = 3
"""Number of newest segments of a table that are synced again in each round: a writer stores only into its two newest.
"""


class TapeSync:
    """Syncs the files of one node's ranks. `every_s` 0: only write the index at the end."""

    def __init__(
        self,
        run: RunDir,
        node_rank: int = 0,
        *,
        every_s: float = 5.0,
        is_running: Callable[[], bool] = lambda: False,
        started: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """`is_running`: returns True while a rank of the node may still write. `started`: returns the newest attempt
        and how many of its ranks have written their identity.
        """
        self._is_running, self._started = is_running, started
        self._synced = (-1, 0)
        """Result of `started` before the last sync."""
        self._run, self._node_rank, self._every_s = run, node_rank, every_s
        self._folders = NodeFolders(run, node_rank)
        self._done: set[str] = set()  # segments that are complete, synced and in the index
        self._indexed_s = -math.inf  # write the first index at once: a run with `watch` but no index counts as damaged
        self._attempt = -1
        self._reported: set[tuple[type[Exception], int | None]] = set()
        self._lock = threading.Lock()

    def running(self) -> AbstractContextManager[None]:
        """Sync in a thread while the block runs."""
        return background_loop(self._run_until, name="tape-sync")

    def sync(self, *, last: bool = False) -> None:
        """Sync the files that may have changed. `last`: sync the files of all attempts, and record their checksums.

        Once no rank runs, checksums also cover records that ranks left open. A file that cannot be synced is reported
        and does not affect other files. Raises OSError if the index cannot be written.
        """
        with self._lock:
            self._sync(last=last)

    def finish(self) -> None:
        """Sync a last time, to include the last findings and events of this process."""
        self._guarded(last=True)

    def retire(self, segments: Mapping[str, int]) -> None:
        """Mark segments that are in the store ({path: number of records}) as retired in the index, then remove them.
        Raises OSError.
        """
        if not segments:
            return
        with self._lock, self._index() as index:
            for name, num_places in segments.items():
                index.retire(name, num_places)
            index.sync()
            for name in segments:
                (self._run.path / name).unlink(missing_ok=True)

    def _sync(self, *, last: bool) -> None:
        folders = self._folders.all()
        newest = max((folder.attempt for folder in folders if not folder.is_node), default=0)
        ended, self._attempt = self._attempt not in (-1, newest), newest
        writes_index = last or ended or time.monotonic() - self._indexed_s >= INDEX_EVERY_S
        names: list[tuple[str, bool]] = []
        for folder in folders:
            if last or ended or folder.is_node or folder.attempt == newest:
                with self._reporting_errors(folder.name):
                    names += self._files(folder)
        done: set[str] = set()
        for name, is_live in sorted(names, key=lambda named: named[0].endswith(".tape")):
            with self._reporting_errors(name), contextlib.suppress(FileNotFoundError):
                sync_file(self._run.path / name)
                done |= set() if is_live else {name}
        for folder in folders:
            with self._reporting_errors(folder.name):
                _sync_folder(folder)
        if writes_index and names:
            self._write_index([name for name, _ in names], is_over=last and not self._is_running())
            self._done |= done

    def _run_until(self, stop: threading.Event) -> None:
        # The first round starts immediately: the ranks may have recorded for seconds before this process started.
        rest_s = 0.0 if self._every_s else 3600.0
        while not self._rest(stop, rest_s):
            start = time.monotonic()
            self._synced = self._started()
            self._guarded(last=False)
            took_s = time.monotonic() - start
            if self._every_s:
                rest_s = max(self._every_s - took_s, self._every_s / 4)
        self._guarded(last=True)

    def _rest(self, stop: threading.Event, rest_s: float) -> bool:
        """Wait for `rest_s`, or until another rank has started. Returns True if the thread should stop."""
        end_s = time.monotonic() + rest_s
        while (left_s := end_s - time.monotonic()) > 0:
            if stop.wait(min(left_s, STARTS_POLL_S)):
                return True
            if self._every_s and self._started() != self._synced:
                break
        return stop.is_set()

    def _guarded(self, *, last: bool) -> None:
        with self._reporting_errors(f"tapes of node {self._node_rank}"):
            self.sync(last=last)

    @contextlib.contextmanager
    def _reporting_errors(self, what: str) -> Iterator[None]:
        """Report an error in the block, once per kind, and continue."""
        try:
            yield
        except Exception as error:  # a full or dead disk, a link, or anything unforeseen: retried in the next round
            is_disk = isinstance(error, OSError)
            kind = (type(error), getattr(error, "errno", None))
            if kind not in self._reported:
                self._reported.add(kind)
                logger.warning("Cannot sync %s: %s", what, error, exc_info=None if is_disk else error)
                self._report(f"{what} cannot be synced: {type(error).__name__}: {error}")

    def _report(self, reason: str) -> None:
        """Write an event, because a power cut may now lose more than the configured seconds."""
        path = self._run.node_dir(self._node_rank) / "events.jsonl"
        with (
            contextlib.suppress(OSError),
            contextlib.closing(EventWriter(path, attempt=0, rank=NODE_RANK)) as events,
        ):
            events.write(event_kinds.HEALTH_FAILED, source="tape", reason=reason)

    def _files(self, folder: Folder) -> Iterator[tuple[str, bool]]:
        """Yield (path in the run, True if a writer may still change it) for a folder's incomplete files."""
        segments = self._folders.segments(folder)
        newest: dict[str, int] = {}
        for table, number, _ in segments:
            newest[table] = max(number, newest.get(table, 0))
        for table, number, name in segments:
            if name not in self._done:
                yield name, number > newest[table] - LIVE_SEGMENTS
        for path in folder.path.glob("*.jsonl"):
            if path.name != INDEX_NAME:
                yield f"{folder.name}/{path.name}", True

    def _write_index(self, names: list[str], *, is_over: bool) -> None:
        """Write the checksums of these files to the node's index."""
        self._indexed_s = time.monotonic()
        with self._index() as index:
            for name in names:
                index.add(self._run.path, name, is_over=is_over)
            index.sync()

    @contextlib.contextmanager
    def _index(self) -> Iterator[SegmentIndex]:
        folder = self._run.node_dir(self._node_rank)
        folder.mkdir(parents=True, exist_ok=True)
        index = SegmentIndex(folder / INDEX_NAME)
        try:
            yield index
        finally:
            index.close()


def _sync_folder(folder: Folder) -> None:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
