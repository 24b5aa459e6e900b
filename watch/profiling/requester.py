"""Ask a suspect and one peer to profile their next steps when a finding is reported (`profiler.on_anomaly`).

    requester = CaptureRequester.of(run, events, node_rank=0)      # None if the run is not configured to
    requester.poll(findings, store, attempt, now_ns)               # once a tick, with newly reported findings

There is at most one request per cool-down, and there are at most `profiler.max_captures` per run, also across restarts
of watch. The watch of node 0 asks for all ranks; another node's watch asks only if node 0 cannot see its records.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from analyzers.finding import Finding
from analyzers.source import Source
from probes.profiling.request import CaptureRequest
from probes.settings.section import read
from probes.settings.sections import ProfilerSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import RunDir
from watch.digests.link import LEADER
from watch.profiling.next_steps import ask, next_step, nodes_of, peer_of

__all__ = ["CaptureRequester"]

logger = logging.getLogger("rankscope.watch")

KINDS = ("straggler", "throughput", "data_bound", "loss_spike", "exploding_gradients", "divergence")
"""Kinds of findings that a profile of the next steps may explain."""


class CaptureRequester:
    """Requester of one node. The thread that judges the store calls `poll`."""

    def __init__(
        self,
        run: RunDir,
        events: EventWriter,
        policy: ProfilerSettings,
        *,
        node_rank: int = LEADER,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._events, self._policy = run, events, policy
        self._node_rank, self._clock_s = node_rank, clock_s
        self._waiting: dict[tuple[object, ...], Finding] = {}
        self._asked: set[tuple[object, ...]] = set()
        self._num_asked, self._asked_s = self._before()

    @classmethod
    def of(cls, run: RunDir, events: EventWriter, *, node_rank: int) -> CaptureRequester | None:
        """Create it from the run's settings; None if they ask for no capture."""
        policy = read(ProfilerSettings, run.manifest())
        asks = policy.on_anomaly and policy.on_request and policy.max_captures
        return cls(run, events, policy, node_rank=node_rank) if asks else None

    def poll(
        self, findings: Sequence[Finding], source: Source, attempt: int, now_ns: int, *, is_paused: bool = False
    ) -> None:
        """Ask for a profile for the first suitable finding, once the cool-down is over, unless `is_paused`.

        `now_ns`: current time on the records' clock, epoch nanoseconds.
        """
        if self._node_rank != LEADER and self._run.node_dir(LEADER).is_dir():
            return
        for finding in findings:
            if finding.kind in KINDS and finding.identity not in self._asked:
                self._waiting.pop(finding.identity, None)
                if finding.status == "fired":
                    self._waiting[finding.identity] = finding
        self._waiting = {key: finding for key, finding in self._waiting.items() if finding.attempt == attempt}
        if is_paused or not self._waiting or self._num_asked >= self._policy.max_captures or self._is_cooling():
            return
        first = next(iter(self._waiting))
        self._asked.add(first)
        self._ask(self._waiting.pop(first), source, attempt, now_ns)

    def _ask(self, finding: Finding, source: Source, attempt: int, now_ns: int) -> None:
        nodes = nodes_of(source, attempt)
        suspect = next((rank for rank in finding.ranks if rank in nodes), min(nodes, default=None))
        if suspect is None:
            return
        peer = peer_of(source, attempt, suspect)
        request = CaptureRequest(
            number=time.time_ns(),
            attempt=attempt,
            ranks=(suspect,) if peer is None else (suspect, peer),
            first_step=next_step(source, attempt, now_ns),
            num_steps=self._policy.anomaly_steps,
            reason=finding.summary,
        )
        unasked = ask(self._run, request, nodes)
        if suspect in unasked:
            logger.warning("Rank %d cannot be asked to profile: its node's folder cannot be written", suspect)
            return
        self._events.write(
            event_kinds.PROFILE_REQUESTED,
            request=request.number,
            ranks=[rank for rank in request.ranks if rank not in unasked],
            first_step=request.first_step,
            num_steps=request.num_steps,
            finding_kind=finding.kind,
            reason=request.reason,
        )
        self._num_asked, self._asked_s = self._num_asked + 1, self._clock_s()

    def _is_cooling(self) -> bool:
        return self._asked_s is not None and self._clock_s() - self._asked_s < self._policy.cooldown_s

    def _before(self) -> tuple[int, float | None]:
        """Number of requests by earlier watches, and the time of the last request on this process's clock."""
        if not self._events.path.exists():
            return 0, None
        found = [
            event.get("wall_ns", 0)
            for event in read_events(self._events.path)[0]
            if event["kind"] == event_kinds.PROFILE_REQUESTED
        ]
        return len(found), self._clock_s() - max(0.0, (time.time_ns() - max(found)) / 1e9) if found else None
