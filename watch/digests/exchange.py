"""Exchange digests in a job of several nodes: each watch sends its own, the leader (node 0) judges all of them.

    job = JobWatch(link, node_rank=1, events=events)
    with Store.open(run) as store:
        job.exchange(store, attempt, local_ranks)        # once a tick
    job.digests, job.offsets_ns                          # for the live analyzers
    job.publish(hangs, attempt, hang_is_open=True)       # the leader's verdict
    job.verdict(attempt)                                 # the verdict that a node received

Events: `node_silent` when a node's digests stop or never arrive, `node_heard` when they return, `clock_offset` when a
node's clock offset is first measured and when it has changed, `message_refused` for forged or replayed messages (each
kind once a minute), and `digests_unsigned` if the job has no secret.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence, Set

from analyzers.finding import Finding
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.run.live.digest import Digest, of_ranks
from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from watch.digests.link import LEADER, DigestLink, Refusal, Verdict

__all__ = ["SILENT_S", "JobWatch"]

SILENT_S = 8.0
"""Seconds without a digest after which a node is called silent. The limit leaves time for a killed watch, which is
restarted within 2 s and imports torch before it sends a digest.
"""
MOVED_NS = 5_000_000
"""A clock offset that has changed by this much is reported again."""
UNHEARD_S = 60.0
"""Seconds from the start of an attempt to the latest expected time of a node's first digest. They are many because the
watch and the ranks of a node import torch at the same time.
"""
REFUSED_EVERY_S = 60.0
"""Seconds between two events about messages refused for the same reason."""
OVER = Verdict(attempt=-1, ranks=(), summary="over")
"""A verdict that withdraws the previous one."""
_RANK_FIELDS = ("exit_rank", "state_rank", "killed_rank")
"""Fields of events in which a number is a rank that did not write the event."""
_LAUNCHER_END_KINDS = (event_kinds.LAUNCHER_LOST, event_kinds.STOP_REQUESTED)
"""Events about the end of a node's launcher. Without them, the leader would take the ends of its ranks for failures."""


class JobWatch:
    """One node's part in the watch of the whole job."""

    def __init__(
        self, link: DigestLink, *, node_rank: int, events: EventWriter, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """`clock`: epoch nanoseconds, the same clock as the link's."""
        self.link = link
        self.clock = clock
        self.node_rank = node_rank
        self.events = events
        self.digests: list[Digest] = []
        self._began_ns = clock()
        self._silent: set[int] = set()
        self._offsets_ns: dict[int, int] = {}
        self._last: Digest | None = None
        self._has_published = False
        # {refusal: (monotonic time of its last report, number of messages refused since then)}
        self._refused: dict[Refusal, tuple[float, int]] = {}
        if not link.is_signed:
            events.write(event_kinds.DIGESTS_UNSIGNED, node_rank=node_rank)

    @property
    def leads(self) -> bool:
        """True if this node's watch judges the whole job."""
        return self.node_rank == LEADER

    @property
    def is_led(self) -> bool:
        """True while another node's watch is reachable and judges this node's ranks."""
        return not self.leads and self.link.answers

    @property
    def offsets_ns(self) -> dict[int, int]:
        """{node: its clock minus this node's, positive if ahead}; empty except on the leader."""
        return {node: clock.offset_ns for node, clock in self.link.clocks.items()}

    def exchange(self, source: Source, attempt: int, local_ranks: Set[int]) -> None:
        """Send the digest of this node's ranks; the leader collects the digests of the other nodes."""
        self._report_refusals()
        if self.leads:
            self.digests = self.link.received()
            self._report_silence()
            self._report_missing_nodes(source, attempt, local_ranks)
            self._report_clocks()
            return
        log = EventLog.load(source, SNAPSHOT_EVENTS, attempt)
        view = of_ranks(take_snapshot(source, attempt, log), local_ranks)
        events = [event for kind in SNAPSHOT_EVENTS for event in log.of(kind) if self._concerns(event, local_ranks)]
        newest = tuple(sorted(events, key=lambda event: event.wall_ns))
        self._last = Digest(node=self.node_rank, sent_ns=self.clock(), view=view, events=newest)
        self.link.publish(self._last)

    def publish(self, hangs: Sequence[Finding], attempt: int, *, hang_is_open: bool) -> None:
        """Send the leader's verdict to all nodes, and withdraw it once no hang is open."""
        if self.leads and hangs:
            self.link.publish_verdict(Verdict.of(hangs, attempt))
            self._has_published = True
        elif self._has_published and not hang_is_open:
            self.link.publish_verdict(OVER)
            self._has_published = False

    def verdict(self, attempt: int) -> Verdict | None:
        """The leader's verdict on this attempt, until it is withdrawn."""
        verdict = self.link.verdict
        return verdict if verdict is not None and verdict.attempt == attempt else None

    def close(self) -> None:
        """Tell the other nodes that this node's watch ends, so that they do not report the node as silent."""
        if self._last is not None:
            last = self._last
            self.link.publish(
                Digest(node=last.node, sent_ns=self.clock(), view=last.view, events=last.events, closing=True)
            )

    def _concerns(self, event: Event, ranks: Set[int]) -> bool:
        """True for an event about one of these ranks, or about the end of this node's launcher."""
        if event.kind in _LAUNCHER_END_KINDS and event.integer("node_rank") == self.node_rank:
            return True
        return event.rank in ranks or any(event.integer(key) in ranks for key in _RANK_FIELDS)

    def _report_refusals(self) -> None:
        for refusal, count in self.link.take_refusals().items():
            before_s, pending = self._refused.get(refusal, (-math.inf, 0))
            if (now_s := time.monotonic()) - before_s < REFUSED_EVERY_S:
                self._refused[refusal] = before_s, pending + count
                continue
            self._refused[refusal] = now_s, 0
            self.events.write(
                event_kinds.MESSAGE_REFUSED,
                node_rank=refusal.node, purpose=refusal.purpose, reason=refusal.reason, num_messages=pending + count,
            )  # fmt: skip

    def _report_silence(self) -> None:
        now_ns = self.clock()
        for digest in self.digests:
            silent_s = (now_ns - digest.received_ns) / 1e9
            if digest.closing or silent_s <= SILENT_S:
                if digest.node in self._silent:
                    self._silent.discard(digest.node)
                    self.events.write(event_kinds.NODE_HEARD, node_rank=digest.node)
            elif digest.node not in self._silent:
                self._silent.add(digest.node)
                ranks = sorted(digest.view.ranks)
                step = digest.view.step
                self.events.write(
                    event_kinds.NODE_SILENT, step=step, node_rank=digest.node, silent_s=round(silent_s, 1), ranks=ranks
                )

    def _report_missing_nodes(self, source: Source, attempt: int, local_ranks: Set[int]) -> None:
        """Report nodes that never sent a digest, if the attempt has more ranks than the received digests cover."""
        unheard = self.link.others - {digest.node for digest in self.digests}
        if not local_ranks or not unheard - self._silent:
            return
        starts = EventLog.load(source, (event_kinds.ATTEMPT_STARTED,), attempt).of(event_kinds.ATTEMPT_STARTED)
        silent_s = (self.clock() - max(starts[-1].wall_ns, self._began_ns)) / 1e9 if starts else 0.0
        known = set(local_ranks).union(*(digest.view.ranks for digest in self.digests))
        missing = sorted(set(range(starts[-1].integer("world_size"))) - known) if starts else []
        for node in unheard - self._silent if missing and silent_s > UNHEARD_S else ():
            self._silent.add(node)
            self.events.write(
                event_kinds.NODE_SILENT, node_rank=node, silent_s=round(silent_s, 1),
                ranks=missing if len(unheard) == 1 else [], never_heard=True,
            )  # fmt: skip

    def _report_clocks(self) -> None:
        for node, (offset_ns, error_ns) in self.link.clocks.items():
            before_ns = self._offsets_ns.get(node)
            if before_ns is None or abs(offset_ns - before_ns) > MOVED_NS:
                self._offsets_ns[node] = offset_ns
                self.events.write(event_kinds.CLOCK_OFFSET, node_rank=node, offset_ns=offset_ns, error_ns=error_ns)
