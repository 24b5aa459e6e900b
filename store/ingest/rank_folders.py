"""Folders of ranks and node processes in a run, the node that each belongs to, and the tape segments in them.

    folders = NodeFolders(run, node_rank=0)
    for folder in folders.all():
        folders.segments(folder)            # [("steps", 0, "attempt-0/rank-00003/steps.00000.tape"), ...]

Folders are listed again only when they have changed.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from probes.tape import event_kinds
from probes.tape.files.safe_open import read_plain
from probes.tape.format.schema import TABLES
from probes.tape.rundir import NODE_RANK, RunDir
from probes.tape.segment_index import INDEX_NAME, MAX_INDEX_BYTES

__all__ = ["Folder", "NodeFolders", "folders_by_node", "node_of"]

FRESH_S = 2.0  # a folder that changed this recently may change again without a new timestamp
_SEGMENT_NAME = re.compile(r"([a-z_]+)\.(\d{5,9})\.tape")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The folder of one rank in one attempt, or of a node process (rank -1)."""

    path: Path
    name: str  # relative to the run
    attempt: int
    rank: int

    @property
    def is_node(self) -> bool:
        return self.rank == NODE_RANK


@dataclass(slots=True)
class NodeFolders:
    """The folders of one node, and the segments in each."""

    run: RunDir
    node_rank: int
    given: Sequence[Folder] | None = None
    """The node's folders if the caller has already scanned them; they are then not scanned again."""
    _owned: dict[str, bool] = field(default_factory=dict)
    _listings: dict[str, tuple[int, list[tuple[str, int, str]]]] = field(default_factory=dict)
    _folders: list[Folder] = field(default_factory=list)
    _signature: tuple[int, ...] = ()

    def all(self) -> list[Folder]:
        """The folders of this node, ranks first."""
        if self.given is not None:
            return list(self.given)
        signature = self._tree_signature()
        if signature != self._signature or _is_fresh(max(signature, default=0)):
            self._signature = signature
            self._folders = list(_all_folders(self.run))
        return [folder for folder in self._folders if self._is_ours(folder)]

    def segments(self, folder: Folder) -> list[tuple[str, int, str]]:
        """Return (table, number, path relative to the run) of a folder's segments, oldest first."""
        try:
            changed = folder.path.stat().st_mtime_ns
        except OSError:
            return []
        known = self._listings.get(folder.name)
        if known is not None and known[0] == changed:
            return known[1]
        found = []
        for path in folder.path.iterdir():
            match = _SEGMENT_NAME.fullmatch(path.name)
            if match and match[1] in TABLES:  # the path may be no regular file; this is reported when it is opened
                found.append((match[1], int(match[2]), f"{folder.name}/{path.name}"))
        # Read steps first. If a step is read as ended, its other records have already been written, and are read next.
        found.sort(key=lambda file: (file[0] != "steps", file))
        self._listings[folder.name] = (-1 if _is_fresh(changed) else changed, found)
        return found

    def _is_ours(self, folder: Folder) -> bool:
        known = self._owned.get(folder.name)
        if known is None:
            node = node_of(folder)
            if node is None:
                return False  # the rank has written nothing yet, so its node is unknown
            known = self._owned[folder.name] = node == self.node_rank
        return known

    def _tree_signature(self) -> tuple[int, ...]:
        """Value that changes whenever a folder of a rank or node may have been added or removed."""
        try:
            attempts = [entry for entry in self.run.tapes.iterdir() if entry.name.startswith("attempt-")]
            return (self.run.tapes.stat().st_mtime_ns, *(entry.stat().st_mtime_ns for entry in attempts))
        except OSError:
            return ()


def folders_by_node(run: RunDir) -> dict[int, list[Folder]]:
    """Folders of every node that wrote to this run, ranks first. Node 0 is always present.

    A single scan for all nodes: separate `NodeFolders` would each scan the folders of all nodes.
    """
    found: dict[int, list[Folder]] = {0: []}
    for folder in _all_folders(run):
        node = node_of(folder)
        if node is not None:
            found.setdefault(node, []).append(folder)
    return dict(sorted(found.items()))


def node_of(folder: Folder) -> int | None:
    """Node that a folder belongs to, from its rank's first event; None if it is not written yet. If the event is
    damaged, the node whose index of checksums has the folder's files, else 0.

    Several nodes may share the run's folder; each ingests its own ranks. A rank writes its identity before its first
    record, so a folder with tapes but without that event is damaged.
    """
    if folder.is_node:
        return int(folder.path.name.rpartition("-")[2])
    try:
        lines = read_plain(folder.path / "events.jsonl", 1 << 16).split(b"\n")
    except OSError:
        lines = []
    for line in lines[:-1]:
        try:
            event = json.loads(line)
            if event["kind"] == event_kinds.RANK and isinstance(event["node_rank"], int):
                return max(0, event["node_rank"])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return _indexing_node(folder) if any(folder.path.glob("*.tape")) or len(lines) > 1 else None


def _indexing_node(folder: Folder) -> int:
    for index in sorted(folder.path.parent.parent.glob(f"node-*/{INDEX_NAME}")):
        with contextlib.suppress(OSError, ValueError):
            if f'"{folder.name}/'.encode() in read_plain(index, MAX_INDEX_BYTES):
                return int(index.parent.name.rpartition("-")[2])
    return 0


def _all_folders(run: RunDir) -> Iterator[Folder]:
    for attempt, rank, path in run.rank_dirs():
        yield Folder(path=path, name=path.relative_to(run.path).as_posix(), attempt=attempt, rank=rank)
    for _, path in run.node_dirs():
        yield Folder(path=path, name=path.relative_to(run.path).as_posix(), attempt=0, rank=NODE_RANK)


def _is_fresh(mtime_ns: int) -> bool:
    return abs(time.time_ns() - mtime_ns) < FRESH_S * 1e9
