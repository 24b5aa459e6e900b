"""Ask the launcher to exclude slow ranks and broken devices, according to the run's settings (`recovery.on_straggler`).

    requester = ExclusionRequester.of(run, judge, events, node_rank=0)     # None if the run only reports stragglers
    requester.poll(store, attempt, now_ns)                    # once a tick

A straggler is excluded once it has been reported for long enough. It is then judged again: it must still be slow and
cost enough, and its device must be the cause. If a reported rank is kept, an event gives the reason.

The watch of node 0 asks for all ranks; another node's watch asks only if node 0 cannot see its records. If other
watches acted, too, two of them could exclude two ranks within one cool-down, because they do not know each other's
requests.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from analyzers.finding import Finding, evidence_of
from analyzers.health.xids import asks_for_replacement
from analyzers.live import LivePolicy, window_start
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.stragglers.analyze import stragglers
from analyzers.wording import ranks_text
from probes.settings.described import ModelFacts
from probes.settings.section import read
from probes.settings.sections import DeviceResponse, RecoverySettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import RunDir
from watch.digests.link import LEADER
from watch.exclusion.policy import reason_to_keep
from watch.exclusion.request import ExclusionRequest, write_request
from watch.live import LiveJudge
from watch.profiling.next_steps import nodes_of

__all__ = ["ExclusionRequester"]


class ExclusionRequester:
    """Requester of one node. The thread that judges the store calls `poll`."""

    def __init__(
        self,
        run: RunDir,
        judge: LiveJudge,
        events: EventWriter,
        settings: RecoverySettings,
        *,
        node_rank: int = LEADER,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._judge, self._events, self._settings = run, judge, events, settings
        self._node_rank, self._clock_s = node_rank, clock_s
        self._has_experts = (read(ModelFacts, run.manifest()).num_experts or 0) > 0
        self._slow_since_s: dict[tuple[int, tuple[int, ...]], float] = {}
        self._answered: set[tuple[int, tuple[int, ...], str]] = set()
        self._acted_s = self._last_request_s()

    @classmethod
    def of(cls, run: RunDir, judge: LiveJudge, events: EventWriter, *, node_rank: int) -> ExclusionRequester | None:
        """Create it from the run's settings; None if they ask for no action."""
        settings = read(RecoverySettings, run.manifest())
        if not settings.enabled or (settings.on_straggler == "report" and settings.on_xid == "report"):
            return None
        return cls(run, judge, events, settings, node_rank=node_rank)

    def poll(self, source: Source, attempt: int, now_ns: int) -> None:
        """Request the exclusions that are due, unless another watch is responsible."""
        if self._node_rank != LEADER and self._run.node_dir(LEADER).is_dir():
            return
        if self._settings.on_xid != "report":
            for finding in self._judge.open_findings("xid", attempt):
                if asks_for_replacement(finding) and finding.ranks:
                    self._request(source, finding, self._settings.on_xid, attempt)
        if self._settings.on_straggler != "report":
            self._poll_stragglers(source, attempt, now_ns)

    def _poll_stragglers(self, source: Source, attempt: int, now_ns: int) -> None:
        now_s = self._clock_s()
        reported = {(attempt, finding.ranks) for finding in self._judge.open_findings("straggler", attempt)}
        self._slow_since_s = {key: self._slow_since_s.get(key, now_s) for key in reported}
        due = {
            ranks
            for (_, ranks), since_s in self._slow_since_s.items()
            if now_s - since_s >= self._settings.straggler_after_s
            and (attempt, ranks, "straggler") not in self._answered
        }
        if not due or self._is_cooling():
            return
        # Judge again: since the report, the slowdown may have become smaller, or may have another cause.
        scope = Scope(
            attempt=attempt,
            since_step=window_start(source, attempt, LivePolicy().window_steps),
            now_ns=now_ns,
            manifest=self._run.manifest(),
        )
        for finding in stragglers(source, scope):
            if finding.status == "fired" and finding.ranks in due:
                self._decide(source, finding, attempt)

    def _decide(self, source: Source, finding: Finding, attempt: int) -> None:
        reason = reason_to_keep(finding, self._settings, has_experts=self._has_experts)
        if not reason:
            self._request(source, finding, self._settings.on_straggler, attempt)
            return
        key = (attempt, finding.ranks, reason.split(" (")[0][:40])
        if key not in self._answered:  # each tick judges the finding again, but the same reason is reported once
            self._answered.add(key)
            self._withhold(finding.ranks, reason)

    def _withhold(self, ranks: Sequence[int], reason: str) -> None:
        text = f"{ranks_text(ranks)} {'stays' if len(ranks) == 1 else 'stay'}: {reason}"
        self._events.write(
            event_kinds.EXCLUSION_WITHHELD, node_rank=None, ranks=list(ranks), dry_run=False, reason=text
        )

    def _request(self, source: Source, finding: Finding, mode: DeviceResponse, attempt: int) -> None:
        cause = finding.kind
        if (attempt, finding.ranks, cause) in self._answered or self._is_cooling():
            return
        self._answered.add((attempt, finding.ranks, cause))
        speedup = float(evidence_of(finding).get("speedup_without_it_ratio") or 0.0) if cause == "straggler" else 0.0
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank, node_rank in nodes_of(source, attempt).items():
            if rank in finding.ranks:
                nodes[node_rank].append(rank)
        for node_rank, ranks in sorted(nodes.items()):
            request = ExclusionRequest(
                attempt=attempt,
                ranks=tuple(sorted(ranks)),
                cause=cause,
                reason=finding.summary,
                keeps_size=mode == "replace",
                min_size_ratio=1 / speedup if speedup else 0.0,
                dry_run=self._settings.exclusion_dry_run,
            )
            # Write the event first: the launcher acts within some hundredths of a second.
            self._events.write(
                event_kinds.EXCLUSION_REQUESTED,
                node_rank=node_rank,
                ranks=list(request.ranks),
                mode=mode,
                cause=cause,
                dry_run=request.dry_run,
                reason=finding.summary,
            )
            if not write_request(self._run, node_rank, request):
                self._withhold(request.ranks, f"the folder of node {node_rank} cannot be written")
        self._acted_s = self._clock_s()

    def _is_cooling(self) -> bool:
        return self._acted_s is not None and self._clock_s() - self._acted_s < self._settings.exclusion_cooldown_s

    def _last_request_s(self) -> float | None:
        """Time of the last request by an earlier watch of this node, on this process's clock."""
        if not self._events.path.exists():
            return None
        found = [
            event.get("wall_ns", 0)
            for event in read_events(self._events.path)[0]
            if event["kind"] == event_kinds.EXCLUSION_REQUESTED
        ]
        return self._clock_s() - max(0.0, (time.time_ns() - max(found)) / 1e9) if found else None
