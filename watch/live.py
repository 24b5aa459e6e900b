"""Run the live analyzers on one node, write new findings as events, and pass them to the exporters.

judge = LiveJudge(run.manifest(), events, exports)
judge.report(judge.findings(store, now_ns))
judge.report_advice(judge.advice(store, run.manifest, now_ns))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analyzers.finding import Finding
from analyzers.live import (
    LiveState,
    ended_findings,
    plugin_findings,
    record_findings,
    remembered,
    standstill_findings,
)
from analyzers.report.wording.explained import next_step
from analyzers.run.live.digest import Digest
from analyzers.run.policy import stall_policy
from analyzers.settings.live_advice import AdviceState, live_advice, remembered_advice
from analyzers.source import Source
from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.redaction.printable import visible
from watch.exporting.exports import Exports

__all__ = ["LiveJudge"]

logger = logging.getLogger("rankscope.watch")


class LiveJudge:
    """Reports each finding once. A killed watch may have reported some before: they are read from its events and not
    repeated.

    Three threads use it: one for hangs and deaths, one for findings of plug-ins, one for all others.
    """

    def __init__(
        self, manifest: Mapping[str, Any], events: EventWriter, exports: Exports, *, stacks_dir: Path | None = None
    ) -> None:
        self._events, self._exports = events, exports
        before = read_events(events.path)[0] if events.path.exists() else []
        self._state = LiveState(
            stall=stall_policy(manifest), manifest=manifest, reported=remembered(before), stacks_dir=stacks_dir
        )
        self._advice = AdviceState(reported=remembered_advice(before))
        self._reported_failures: set[tuple[str, str]] = set()

    @property
    def is_stopping(self) -> bool:
        """True once the run is being stopped, so that the end of its ranks does not close findings."""
        return self._state.is_stopping

    @is_stopping.setter
    def is_stopping(self, value: bool) -> None:
        self._state.is_stopping = value

    @property
    def is_behind(self) -> bool:
        """True if another call must still judge an earlier attempt, or steps before the newest."""
        return self._state.missed is not None or self._state.attempt != (self._state.newest or 0)

    @property
    def errors(self) -> Mapping[str, int]:
        """{analyzer: number of failures}."""
        return {**self._state.errors, **self._advice.errors}

    def has_open_hang(self, attempt: int) -> bool:
        """Return True while a reported hang of the attempt is not over."""
        return bool(self.open_findings("hang", attempt))

    def open_findings(self, kind: str, attempt: int) -> list[Finding]:
        """Reported findings of a kind and attempt that are not over."""
        with self._state.lock:
            reported = list(self._state.reported.values())
        return [f for f in reported if f.kind == kind and f.status == "fired" and f.attempt == attempt]

    def add_nodes(self, digests: Sequence[Digest], clock_offsets_ns: Mapping[int, int]) -> None:
        """Set the digests of other nodes' ranks for the next `findings`; empty unless this node leads."""
        self._state.sees_part = True
        self._state.digests, self._state.clock_offsets_ns = digests, clock_offsets_ns

    def findings(self, source: Source, now_ns: int) -> list[Finding]:
        """New and changed findings at `now_ns` (epoch nanoseconds), without findings of plug-ins."""
        return [*self.standstill_findings(source, now_ns), *self.record_findings(source, now_ns)]

    def standstill_findings(self, source: Source, now_ns: int) -> list[Finding]:
        """New and changed findings on hangs and lost ranks, from the newest records."""
        return standstill_findings(source, self._state, now_ns)

    def ended_findings(self, source: Source, ended: Sequence[int]) -> list[Finding]:
        """New findings on the ends of attempts that are no longer the newest, from the last records of each."""
        return ended_findings(source, self._state, ended)

    def record_findings(self, source: Source, now_ns: int, *, num_ticks: int = 1) -> list[Finding]:
        """New and changed findings of other kinds, from the whole store. `num_ticks`: seconds since the last call."""
        return record_findings(source, self._state, now_ns, num_ticks=num_ticks)

    def plugin_findings(self, source: Source, now_ns: int, *, num_ticks: int = 1) -> list[Finding]:
        """New and changed findings of plug-ins. May block up to the plug-ins' time limit."""
        return plugin_findings(source, self._state, now_ns, num_ticks=num_ticks)

    def advice(
        self, source: Source, manifest: Callable[[], Mapping[str, Any]], now_ns: int, *, is_last: bool = False
    ) -> list[Finding]:
        """New advice on the run's configuration. `is_last`: the run is ending."""
        return live_advice(source, self._advice, manifest, now_ns, is_last=is_last)

    def report_advice(self, advice: Sequence[Finding]) -> bool:
        """Write advice as events only; it is never exported or alerted. Returns True if there was any."""
        for finding in advice:
            self._events.write(
                event_kinds.ADVICE,
                finding_kind=finding.kind,
                cause=finding.cause,
                summary=finding.summary,
                next=next_step(finding),
            )
        return bool(advice)

    def report_failures(self) -> None:
        """Write an event for each analysis and plug-in that failed, once per reason."""
        with self._state.lock:
            failed = {(name, reason) for name, reasons in self._state.failures.items() for reason in reasons}
            news, self._reported_failures = failed - self._reported_failures, failed | self._reported_failures
        for name, reason in sorted(news):
            line = visible(" ".join(reason.split()))[:500]
            logger.warning("%s failed: %s", name, line)
            self._events.write(event_kinds.ANALYZER_FAILED, analyzer=name, reason=line)

    def report(self, findings: Sequence[Finding]) -> bool:
        """Write findings as events and export them; returns True if there were any."""
        for finding in findings:
            self._events.write(event_kinds.FINDING, **_event_columns(finding))
        self._exports.report(findings)
        return bool(findings)


def _event_columns(finding: Finding) -> dict[str, Any]:
    columns = finding.to_json()
    columns["finding_ranks"] = columns.pop("ranks")
    columns["step"] = finding.first_step
    if finding.attempt is None:
        columns.pop("attempt")
    columns["finding_kind"] = columns.pop("kind")
    return columns
