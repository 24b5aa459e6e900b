"""Assign ranks to nodes, turns and rounds, from what each rank reports about itself.

layout = Layout.of({0: Hello(...), 1: Hello(...)}, world_size=2)
layout.node_of[1]             # "gpu-02"
layout.turn_before(1)          # 0: the rank that measures its processor before rank 1
layout.rounds()                # [[(0, 8), (1, 9), ...], ...]: ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from trainer.preflight.rounds import Pair, pair_rounds

__all__ = ["Hello", "Layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first report of a rank."""

    host: str
    node_key: str
    boot_id: str
    local_rank: int
    is_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The ranks that answered, and the node of each."""

    world_size: int
    node_of: Mapping[int, str]
    boot_of: Mapping[int, str]
    is_gpu: bool
    """True if each rank has a separate GPU."""

    @classmethod
    def of(cls, hellos: Mapping[int, Hello], world_size: int) -> Self:
        """Make the layout. A node is named after its host; several nodes with the same host name get a number."""
        keys = list(dict.fromkeys(hello.node_key for _, hello in sorted(hellos.items())))
        host_of = {hello.node_key: hello.host for hello in hellos.values()}
        names = {}
        for key in keys:
            same = [other for other in keys if host_of[other] == host_of[key]]
            names[key] = host_of[key] if len(same) == 1 else f"{host_of[key]}/{same.index(key)}"
        return cls(
            world_size=world_size,
            node_of={rank: names[hello.node_key] for rank, hello in sorted(hellos.items())},
            boot_of={rank: hello.boot_id for rank, hello in sorted(hellos.items())},
            is_gpu=all(hello.is_gpu for hello in hellos.values()),
        )

    @property
    def is_complete(self) -> bool:
        return len(self.node_of) == self.world_size

    def nodes(self) -> dict[str, list[int]]:
        """Node -> its ranks, ascending."""
        found: dict[str, list[int]] = {}
        for rank, node in self.node_of.items():
            found.setdefault(node, []).append(rank)
        return found

    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [ranks[0] for ranks in self.nodes().values()]

    def measures_speed(self, rank: int) -> bool:
        """True if this rank measures a device. Each rank measures its GPU. Without GPUs, the first rank of a node
        measures all cores of the node."""
        return self.is_gpu or rank in self.leaders()

    def turn_before(self, rank: int) -> int | None:
        """The rank that measures before this one, if several share processor cores; None for the first, and with
        GPUs."""
        if self.is_gpu:
            return None
        sharing = [other for other in self.leaders() if self.boot_of[other] == self.boot_of[rank]]
        index = sharing.index(rank)
        return sharing[index - 1] if index else None

    def rounds(self) -> list[list[Pair]]:
        """Rounds of pairs of ranks on different nodes; with a single node, of pairs within the node.

        If each rank has a separate GPU, and perhaps network card, all ranks of a pair of nodes measure simultaneously.
        """
        nodes = [*self.nodes().values()]
        if len(nodes) == 1:
            ends = [[rank] for rank in nodes[0]]
        elif self.is_gpu and len({len(ranks) for ranks in nodes}) == 1:
            ends = nodes
        else:
            ends = [ranks[:1] for ranks in nodes]
        return [
            [(min(pair), max(pair)) for a, b in pairs for pair in zip(ends[a], ends[b], strict=True)]
            for pairs in pair_rounds(len(ends))
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`, after a JSON round trip has turned the keys into strings."""
        ranks = {name: {int(rank): text for rank, text in values[name].items()} for name in ("node_of", "boot_of")}
        return cls(**{**values, **ranks})
