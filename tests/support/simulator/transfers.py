"""Time of transfers: collectives in a ring, and point to point.

    links = Links(layout, job, noise, rng)
    links.slow[3] = 8.0                       # everything that leaves rank 3 takes eight times as long
    ends = links.collective("tp", groups, arrival, "all_reduce", 1 << 20, first=False)

A collective starts when its last member has arrived and the group's previous transfer is over. All times in ns.
"""

from __future__ import annotations

import numpy as np

from .layout import Ints, Layout
from .noise import Noise
from .program import Job
from .records import Floats

__all__ = ["Links"]

NS = 1e9
_MOVED = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0, "barrier": 0.0}
"""Bytes that a ring moves through a rank, x (n - 1) / n of the whole buffer."""


class Links:
    """The network between ranks."""

    def __init__(self, layout: Layout, job: Job, noise: Noise, rng: np.random.Generator) -> None:
        self.job, self.noise, self.rng = job, noise, rng
        self.slow = np.ones(layout.num_ranks)
        """How many times as long a transfer over the rank's outgoing link takes."""
        self.dead_rank = -1
        """A rank whose network is gone: transfers in which it takes part never end."""
        self._nodes = layout.nodes()
        self._free: dict[str, Floats] = {}

    def collective(self, dim: str, groups: Ints, arrival: Floats, op: str, size: int, *, first: bool) -> Floats:
        """(groups, members) ends of one collective in each group, from the (groups, members) arrivals."""
        job, noise, rng = self.job, self.noise, self.rng
        count, members = groups.shape
        free = self._free.setdefault(dim, np.zeros(len(self.slow)))
        start = np.maximum(arrival.max(axis=1), free[groups].max(axis=1))
        whole = size * (members if op == "all_gather" else 1)
        moved = _MOVED.get(op, 1.0) * (members - 1) / members * whole
        seconds = job.latency_s * np.log2(members + 1) + moved / self._bandwidth(groups[:, 0], groups[:, -1])
        seconds = seconds * np.exp(noise.transfer_ratio * rng.standard_normal(count))
        seconds[rng.random(count) < noise.transfer_tail_probability] *= noise.transfer_tail_factor
        if first:
            seconds = seconds + noise.communicator_s
        links = self.slow[groups]
        durations = np.broadcast_to(seconds[:, None], groups.shape)
        if (links > 1.0).any():
            durations = _graded(seconds, links)
        durations = np.where((groups == self.dead_rank).any(axis=1)[:, None], np.inf, durations)
        end: Floats = start[:, None] + durations * NS + np.abs(rng.standard_normal(groups.shape)) * (noise.exit_s * NS)
        free[groups] = end.max(axis=1)[:, None]
        return end

    def point_to_point(self, source: Ints, target: Ints, posted: Floats, size: Ints) -> Floats:
        """Ends of one message a pair; `posted`: when the later side of each pair had made its call."""
        slow = np.maximum(self.slow[source], self.slow[target])
        seconds = self.job.latency_s + size / self._bandwidth(source, target) * slow
        seconds = seconds * np.exp(self.noise.transfer_ratio * self.rng.standard_normal(len(source)))
        seconds[(source == self.dead_rank) | (target == self.dead_rank)] = np.inf
        end: Floats = posted + seconds * NS
        return end

    def _bandwidth(self, one: Ints, other: Ints) -> Floats:
        """Bytes per second between two ranks, of one node or of two."""
        same = self._nodes[one] == self._nodes[other]
        return np.where(same, self.job.link_bytes_per_s, self.job.network_bytes_per_s)


def _graded(seconds: Floats, links: Floats) -> Floats:
    """(groups, members) durations of a ring in which some links are slow.

    Every chunk passes every link, one after the other, so the whole takes as long as the slowest link needs for all
    its chunks. The receiver behind that link gets each chunk at the link's pace; the member d positions further gets
    its last chunk d - 1 rounds earlier, but not before a healthy ring would deliver it. The sender is busy until the
    end.
    """
    count, members = links.shape
    rounds = 2 * (members - 1)
    worst = links.argmax(axis=1)
    slow = links.max(axis=1)
    distance = (np.arange(members)[None, :] - worst[:, None] - 1) % members  # 0: right behind the slow link
    factors = np.maximum(1.0, slow[:, None] - (slow[:, None] - 1.0) * distance / rounds)
    factors[np.arange(count), worst] = slow
    durations: Floats = seconds[:, None] * factors
    return durations
