"""Readings of a preflight: one per rank, one per link and direction, and one for the all-reduce.

    readings = Readings(world_size=2, ranks=(RankReading(rank=0, ...), ...), links=(...,))
    Readings.of_json(readings.to_json()) == readings

None means not measured. The verdict is formed by `trainer.preflight.verdict.judge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

__all__ = ["AllReduceReading", "LinkReading", "RankReading", "Readings", "SettingReading", "bus_bytes_per_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """Readings of a rank: its device, and its node as the rank sees it."""

    rank: int
    local_rank: int = 0
    node: str
    """Name of the node: its host name, with a number if several nodes have the same host name."""
    host: str = ""
    device: str = "cpu"
    """Model of the device: speeds are compared among equal models."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Versions and hardware that should be the same everywhere."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that should be the same everywhere."""
    disk_free_bytes: int | None = None
    shared_free_bytes: int | None = None
    matmul_flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    core_wait_ratio: float | None = None
    """Share of the measurement in which the process waited for a processor core."""
    clock_offset_ns: int | None = None
    """Offset from rank 0's clock; positive if this clock is ahead."""
    clock_error_ns: int | None = None
    problem: str = ""
    """Reason why this rank could not measure everything; empty if it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReading:
    """One direction of the link between two ranks; the latency is half a round trip."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceReading:
    """The all-reduce over all ranks. The bus bandwidth of an all-reduce is 2 (n - 1) / n x size / time, as in
    nccl-tests."""

    num_bytes: int
    bus_bytes_per_s: float
    latency_s: float


def bus_bytes_per_s(num_bytes: int, seconds: float, world_size: int) -> float:
    """Bus bandwidth of an all-reduce."""
    return 2 * (world_size - 1) / world_size * num_bytes / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingReading:
    """All-reduces of several sizes in processes with these variables; each setting is measured several times."""

    variables: Mapping[str, str]
    """Environment variables; empty for the library's own choice."""
    seconds: Mapping[int, float]
    """Size in bytes -> duration of one all-reduce; empty if it failed."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """All readings of one preflight."""

    world_size: int
    ranks: tuple[RankReading, ...]
    links: tuple[LinkReading, ...] = ()
    all_reduce: AllReduceReading | None = None
    settings: tuple[SettingReading, ...] = ()
    backend: str = ""
    num_rounds: int = 0
    duration_s: float = 0.0

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not answer."""
        return tuple(sorted(set(range(self.world_size)) - {reading.rank for reading in self.ranks}))

    def nodes(self) -> dict[str, tuple[RankReading, ...]]:
        """Node -> its ranks."""
        found: dict[str, tuple[RankReading, ...]] = {}
        for reading in self.ranks:
            found[reading.node] = (*found.get(reading.node, ()), reading)
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`. Raises TypeError or KeyError for anything else."""
        all_reduce, settings = values["all_reduce"], values.get("settings", ())
        return replace(
            cls(**{**values, "ranks": (), "links": (), "all_reduce": None, "settings": ()}),
            ranks=tuple(RankReading(**reading) for reading in values["ranks"]),
            links=tuple(LinkReading(**reading) for reading in values["links"]),
            all_reduce=AllReduceReading(**all_reduce) if all_reduce else None,
            settings=tuple(
                SettingReading(**{**reading, "seconds": {int(size): took for size, took in reading["seconds"].items()}})
                for reading in settings
            ),
        )
