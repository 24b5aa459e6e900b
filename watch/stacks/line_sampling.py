"""Sample the stacks of a slow rank and of one peer, to find the line that the slow rank is in more often.

    lines = LineSampler(run, events)
    lines.sample(finding, {0: 4711, 1: 4712})       # returns immediately; the result is an event `slow_line`

The rank receives about twenty signals, on which `faulthandler` writes its stack from C; nothing else runs in the rank.
Only the excess over the peer counts, so that a line in which both wait for each other is not taken for the cause.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping

from analyzers.finding import Finding
from analyzers.hangs.stacks import read_stack
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from watch.processes import is_alive
from watch.stacks.signal_dump import take_stacks

__all__ = ["LineSampler", "distinctive_line"]

NUM_SAMPLES = 20
BETWEEN_S = (0.05, 0.2)
"""Range of the random seconds between two samples: a fixed interval might be in phase with the steps."""
NOT_IN_CODE = ("communication", "gpu_clock", "sequence_length")
"""Causes that a line of the script cannot explain."""


class LineSampler:
    """Samples each straggler once. `enabled` False: never sample or send a signal."""

    def __init__(self, run: RunDir, events: EventWriter, *, enabled: bool = True) -> None:
        self._run, self._events, self._enabled = run, events, enabled
        self._sampled: set[tuple[int | None, int]] = set()
        self._thread: threading.Thread | None = None

    @property
    def is_sampling(self) -> bool:
        """True while samples are taken."""
        return self._thread is not None and self._thread.is_alive()

    def sample(self, finding: Finding, pids: Mapping[int, int]) -> None:
        """Start sampling the rank of a straggler finding if it is one of this node's ranks ({rank: pid}). Only one rank
        is sampled at a time."""
        if not self._enabled or finding.kind != "straggler" or finding.status != "fired":
            return
        if finding.cause in NOT_IN_CODE or len(finding.ranks) != 1 or finding.attempt is None:
            return
        suspect = finding.ranks[0]
        peer = next((rank for rank in sorted(pids) if rank != suspect), None)
        if suspect not in pids or peer is None or self.is_sampling or (finding.attempt, suspect) in self._sampled:
            return
        self._sampled.add((finding.attempt, suspect))
        sampled = {suspect: pids[suspect], peer: pids[peer]}
        self._thread = threading.Thread(
            target=self._sample, args=(finding.attempt, suspect, peer, sampled), name="slow-line", daemon=True
        )
        self._thread.start()

    def _sample(self, attempt: int, suspect: int, peer: int, pids: Mapping[int, int]) -> None:
        lines: dict[int, Counter[str]] = {suspect: Counter(), peer: Counter()}
        for _ in range(2 * NUM_SAMPLES):  # on a busy machine some stacks are written too late to be read
            if lines[suspect].total() >= NUM_SAMPLES or not is_alive(pids[suspect]):
                break
            for rank in take_stacks(self._run, attempt, pids):
                if frames := read_stack(self._run.stacks, attempt, rank):
                    lines[rank][frames[0]] += 1
            time.sleep(random.uniform(*BETWEEN_S))
        found = distinctive_line(lines[suspect], lines[peer])
        if found is not None:
            line, share, peer_share = found
            self._events.write(
                event_kinds.SLOW_LINE, slow_rank=suspect, peer_rank=peer, line=line, share_ratio=share,
                peer_share_ratio=peer_share, num_samples=lines[suspect].total(),
            )  # fmt: skip


def distinctive_line(suspect: Counter[str], peer: Counter[str]) -> tuple[str, float, float] | None:
    """Return (line, share of the suspect's samples, share of the peer's samples) for the line with the largest excess,
    or None.

    The excess must be a quarter of the samples: for 20 samples and a step that is 20 % slower, this is twice the excess
    expected by chance.
    """
    num_suspect, num_peer = suspect.total(), peer.total()
    if num_suspect < NUM_SAMPLES // 2 or not num_peer:
        return None
    excess = {line: count / num_suspect - peer[line] / num_peer for line, count in suspect.items()}
    line = max(excess, key=lambda name: excess[name])
    if excess[line] < 0.25:
        return None
    return line, suspect[line] / num_suspect, peer[line] / num_peer
