"""Paths of the objects of a published run.

    <address>/<run id>/run.json
    <address>/<run id>/node-00000.json                                   which rounds are complete
    <address>/<run id>/node-00000/<generation>/round-000017.json         rows of each table in this round
    <address>/<run id>/node-00000/<generation>/<table>/part-000017.parquet
    <address>/<run id>/node-00000/<generation>/<table>/now-1.parquet     replaced when it changes

Tables that only grow are published in parts; tables whose rows change are published whole. A restarted `watch` begins a
new generation, because it cannot know which rows its predecessor had published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from probes.tape.format.schema import TABLES
from store.ddl import fingerprint, finished_table

__all__ = ["GROWING", "REPLACED", "SEQUENCE", "NodeState", "node_file", "now_path", "part_path", "round_file"]

GROWING = {table.name: finished_table(table) for table in TABLES.values() if table.name != "nccl_groups"}
"""{table of the schema: table of the store whose rows are published in parts}."""
REPLACED = (*(f"{table.name}_open" for table in TABLES.values() if table.can_be_open), "ingest_problems", "nccl_groups")
SEQUENCE = b"rankscope.sequence"
"""Metadata key of a Parquet file that holds the number of its round."""
NOW_SLOTS = 4
"""Number of objects that a replaced table cycles through: a reader that falls this many rounds behind has to read the
state again.
"""
FORMAT = 1
_GENERATION = re.compile(r"[0-9a-f]{1,32}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """Content of `node-<n>.json`: rounds up to `sequence` are complete."""

    generation: str
    sequence: int
    replaced: Mapping[str, int]
    """{table that is replaced: round that wrote its newest object}."""
    published_wall_ns: int
    """Time up to which the published rows are complete (epoch nanoseconds)."""
    is_last: bool
    fingerprint: str
    """Fingerprint of the tables' columns; a reader with other columns cannot use the rows."""
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Serialise for the object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> NodeState:
        """Parse what `to_json` wrote. Raises ValueError for anything else."""
        try:
            if content["format"] != FORMAT or not _GENERATION.match(content["generation"]):
                raise ValueError("of another format")
            if content["fingerprint"] != fingerprint():
                raise ValueError("published by another version of rankscope: read it with that one")
            return cls(
                generation=content["generation"],
                sequence=int(content["sequence"]),
                replaced={table: int(content["replaced"][table]) for table in REPLACED if table in content["replaced"]},
                published_wall_ns=int(content["published_wall_ns"]),
                is_last=bool(content["is_last"]),
                fingerprint=content["fingerprint"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the state of a published node ({type(error).__name__})") from None


def node_file(run: str, node_rank: int) -> str:
    """Path of the object that states which rounds of a node are complete."""
    return f"{run}/node-{node_rank:05d}.json"


def round_file(run: str, node_rank: int, generation: str, sequence: int) -> str:
    """Path of the object with the number of rows of each table in a round."""
    return f"{run}/node-{node_rank:05d}/{generation}/round-{sequence:06d}.json"


def part_path(run: str, node_rank: int, generation: str, table: str, sequence: int) -> str:
    """Path of one part of a growing table."""
    return f"{run}/node-{node_rank:05d}/{generation}/{table}/part-{sequence:06d}.parquet"


def now_path(run: str, node_rank: int, generation: str, table: str, sequence: int) -> str:
    """Path of the object that a round writes for a replaced table."""
    return f"{run}/node-{node_rank:05d}/{generation}/{table}/now-{sequence % NOW_SLOTS}.parquet"
