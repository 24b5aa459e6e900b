"""Ask ranks of a live run to profile the same future steps.

    nodes = nodes_of(source, attempt=0)                   # {rank: node}
    first = next_step(source, attempt=0, now_ns=now_ns)
    ask(run, request, nodes)                              # writes to the folder of each node

Ranks read a request within a second, so the first step is chosen about two seconds ahead.
"""

from __future__ import annotations

import math

from analyzers.source import Source
from probes.profiling.request import CaptureRequest, write_request
from probes.tape.rundir import RunDir

__all__ = ["ask", "next_step", "nodes_of", "peer_of"]

AHEAD_S = 2.5
MAX_LAG_S = 10.0
"""Maximum seconds that the records lag behind the ranks (a round and its analysis). A larger lag means that the ranks
are stalled, or that clocks differ.
"""


def nodes_of(source: Source, attempt: int) -> dict[int, int]:
    """{rank: node} of an attempt."""
    if not source.has("ranks"):
        return {}
    rows = source.rows(
        "SELECT rank, arg_max(node_rank, wall_ns) FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank", [attempt]
    )
    return {int(rank): int(node) for rank, node in rows if node is not None}


def peer_of(source: Source, attempt: int, suspect: int) -> int | None:
    """The peer of a suspect: a rank of the same pipeline stage, preferably on the same node, with the nearest
    number.
    """
    rows = source.rows(
        "SELECT rank, arg_max(node_rank, wall_ns), max(pp) FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank",
        [attempt],
    )
    places = {int(rank): (node, stage) for rank, node, stage in rows}
    if suspect not in places:
        return None
    node, stage = places[suspect]
    peers = [rank for rank, (_, its_stage) in places.items() if rank != suspect and its_stage == stage]
    return min(peers, key=lambda rank: (places[rank][0] != node, abs(rank - suspect), rank), default=None)


def next_step(source: Source, attempt: int, now_ns: int) -> int:
    """Estimate a step that no rank will have reached by the time it reads the request. The estimate uses the speed of
    the last steps.

    `now_ns`: current time on the records' clock. The newest step is the one that began last, which after a rollback is
    not the highest.
    """
    ((newest, begun_ns, step_ns),) = source.rows(
        """
        SELECT arg_max(step, start_ns), max(start_ns),
               median(duration_ns) FILTER (step > (SELECT max(step) FROM steps WHERE attempt = ?) - 20)
        FROM steps WHERE attempt = ?
        """,
        [attempt, attempt],
    )
    if newest is None:
        return 0
    if not step_ns:
        return int(newest) + 2
    lag_s = min(MAX_LAG_S, max(0.0, (now_ns - int(begun_ns)) / 1e9))
    return int(newest) + 1 + math.ceil((lag_s + AHEAD_S) * 1e9 / float(step_ns))


def ask(run: RunDir, request: CaptureRequest, nodes: dict[int, int]) -> list[int]:
    """Write the request to the folders of its ranks' nodes. Returns the ranks for which this failed."""
    asked = {node: write_request(run, node, request) for node in {nodes[r] for r in request.ranks if r in nodes}}
    return [rank for rank in request.ranks if not asked.get(nodes.get(rank, -1), False)]
