"""Records of launcher, watch and ranks before the first step: processes, hosts, groups.

events = introduction(scenario)
"""

from __future__ import annotations

from .layout import WORLD
from .on_devices import communicators_of
from .recording import Event, Scenario

__all__ = ["introduction"]

NODE = -1


def introduction(scenario: Scenario) -> list[Event]:
    """The events of launcher, watch and ranks before the first step."""
    layout, at, nodes = scenario.layout, scenario.layout.coordinates(), scenario.layout.nodes()
    launched = {"nproc_per_node": layout.ranks_per_node, "max_restarts": 0}
    events = [
        Event(NODE, -2.0e9, "run_started", None, launched),
        Event(NODE, -1.9e9, "attempt_started", None, {"world_size": layout.num_ranks}),
        Event(NODE, -1.8e9, "watch_started", None, {"pid": 999}),
    ]
    members = {dim: layout.members(dim).tolist() for dim in (*layout.used_dims(), WORLD)}
    labels = {dim: layout.labels(dim) for dim in members}
    group_of = {dim: {rank: group for group in groups for rank in group} for dim, groups in members.items()}
    for rank in range(layout.num_ranks):
        identity = {
            "world_size": layout.num_ranks, "local_rank": rank % layout.ranks_per_node, "node_rank": int(nodes[rank]),
            "host": f"node-{nodes[rank]}", "pid": 10_000 + rank,
            "device": "cpu" if scenario.backend == "gloo" else f"cuda:{rank % layout.ranks_per_node}",
            **{dim: int(at[dim][rank]) for dim in at},
        }  # fmt: skip
        events.append(Event(rank, -1.0e9, "rank", 0, identity))
        for dim in communicators_of(layout) if scenario.on_devices else members:
            detail = {"process_group": labels[dim][rank], "description": layout.description(dim)}
            if scenario.on_devices:
                detail["recorded_by"] = "nccl_plugin"
            events.append(Event(rank, -0.9e9, "process_group", 0, detail | {"members": group_of[dim][rank]}))
    return events
