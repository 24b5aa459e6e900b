"""Folders and segments that the newest attempts of a run write, for checking its progress and the ends of ranks.

    folders = NewestFolders(run, 0)
    folders.all()                      # folders of the newest attempt, and of the node process
    folders.segments(folder)           # the last few of each table that shows progress

The number of these segments does not grow with the run, so they can be read from their start at any time.
"""

from __future__ import annotations

from dataclasses import dataclass

from store.ingest.rank_folders import Folder, NodeFolders

__all__ = ["NewestFolders"]

KEPT_SEGMENTS = 3
"""Segments kept per table. A writer completes records in its two newest segments only."""
PROGRESS_TABLES = frozenset({"steps", "spans", "collectives", "nccl_communicators", "nccl_calls"})


@dataclass(slots=True)
class NewestFolders(NodeFolders):
    """The folders of one node in the newest attempt of the run; with `all_nodes`, the folders of all nodes."""

    since: int | None = None
    """The first attempt that is read; None: the newest alone."""
    all_nodes: bool = False
    with_health: bool = False
    """True to include the tapes of the node process, which show devices and hosts but no progress."""

    @property
    def attempt(self) -> int:
        """The newest attempt in which a rank of any node has a folder; 0 if there is no such folder."""
        return max((folder.attempt for folder in self._folders if not folder.is_node), default=0)

    @property
    def oldest(self) -> int:
        """The first attempt that is read."""
        return self.attempt if self.since is None else self.since

    def all(self) -> list[Folder]:
        """The folders, ranks first."""
        of_node = NodeFolders.all(self)  # also lists the folders of the other nodes
        found, oldest = (self._folders if self.all_nodes else of_node), self.oldest
        return [folder for folder in found if folder.is_node or folder.attempt >= oldest]

    def is_own(self, folder: Folder) -> bool:
        """True for a folder of this node."""
        return self._owned.get(folder.name, False)

    def segments(self, folder: Folder) -> list[tuple[str, int, str]]:
        """Return (table, number, path relative to the run) of the newest segments, oldest first."""
        if folder.is_node and not self.with_health:
            return []
        found = NodeFolders.segments(self, folder)
        newest: dict[str, int] = {}
        for table, number, _ in found:
            newest[table] = max(number, newest.get(table, 0))
        return [
            (table, number, path)
            for table, number, path in found
            if (folder.is_node or table in PROGRESS_TABLES) and number > newest[table] - KEPT_SEGMENTS
        ]
