"""Everything that the analyzers report of a run, and one sentence on top.

    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest(), stacks_dir=run.stacks)
    diagnosis.verdict          # "Rank 3 has been slow since step 60: +19 ms of compute per step (1.28x)."
    diagnosis.fired            # findings that name something wrong: open ones first, of those the worst

An analysis that fails costs its own findings (`insufficient_data`, with the error), never those of the others.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from analyzers.account.long_run import Views, reduced_views, whole_views
from analyzers.account.step_account import coverage
from analyzers.analysis import Records, analyses
from analyzers.kinds import KINDS, OUR_KINDS
from analyzers.plugin_calls.named import MAX_OF_A_KIND, folded
from analyzers.run.file_problems import file_problems
from analyzers.run.open_findings import closed_findings, reported_findings
from analyzers.run.policy import stall_policy
from analyzers.run.recorded_findings import recorded_findings
from analyzers.run.remembered import Remembered
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.verdict.run_facts import run_facts
from analyzers.verdict.verdict import verdict
from probes.tape.printable import escaped
from probes.tape.secrets import Redactor

# Relative, as in each module whose types `rankscope.api` returns: a type checker that finds this package as
# `rankscope.analyzers` in a wheel follows them there.
from .account import goodput
from .finding import SEVERITIES, Finding, Severity
from .whatif import what_if as whatif

__all__ = ["SCHEMA_VERSION", "Diagnosis", "conclude", "diagnose", "failed_check", "reaching", "reading_order"]

SCHEMA_VERSION = 2
"""Of the JSON report: raised when a reader of the former version would misread it. 2: an id names a finding by its
kind's identity (`straggler-0-r3`), no longer by its first step."""
_STATUS_ORDER = {"fired": 0, "suspect": 1, "advice": 2, "ok": 3, "insufficient_data": 4}
_REDACTOR = Redactor()
_SEGMENT = re.compile(r"\.\d+\.tape(#checksum)?$")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis:
    """A run's facts, one sentence, and all findings, the most severe first."""

    run: Mapping[str, Any]
    """Facts: run_id, steps, num_ranks, world_size, how it ended, `file_problems`. Those that are known."""
    verdict: str
    """One to three sentences: what went wrong, on which rank."""
    findings: tuple[Finding, ...]
    """All of them, in the order in which they are read; `fired`, `advised` and `not_judged` are parts of it."""
    goodput: goodput.Account | None = None
    """Where the wall time went; None where no step was recorded."""
    what_if: whatif.WhatIf | None = None
    """What stragglers cost the job; None with one rank or too few steps."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """{id of a finding: why it is over}."""

    @property
    def fired(self) -> tuple[Finding, ...]:
        """Findings that name something wrong, certain or suspected."""
        return tuple(finding for finding in self.findings if finding.status in ("fired", "suspect"))

    @property
    def cards(self) -> tuple[Finding, ...]:
        """Those of `fired` that pages and terminals show: of a plug-in's kind three, and the number of the others."""
        return tuple(folded(self.fired, MAX_OF_A_KIND))

    @property
    def advised(self) -> tuple[Finding, ...]:
        """Advice: nothing is broken, and something could go better."""
        return tuple(finding for finding in self.findings if finding.status == "advice")

    @property
    def not_judged(self) -> tuple[Finding, ...]:
        """Checks that could not be judged, with the reason."""
        return tuple(finding for finding in self.findings if finding.status == "insufficient_data")

    def __repr__(self) -> str:
        return f"Diagnosis({self.verdict})"

    def _repr_markdown_(self) -> str:
        """The verdict and what fired, for a notebook."""
        return "\n".join([f"**{escaped(self.verdict)}**", "", *(f"- {escaped(one.summary)}" for one in self.fired)])

    @property
    def damaged_tapes(self) -> tuple[Mapping[str, str], ...]:
        """Segments of tapes that could not be read, or not wholly: `path` and `problem`."""
        return tuple(found for found in self.run.get("file_problems", ()) if _SEGMENT.search(found["path"]))


def diagnose(
    source: Source,
    manifest: Mapping[str, Any],
    *,
    now_ns: int | None = None,
    stacks_dir: Path | None = None,
) -> Diagnosis:
    """Run every analysis. `now_ns` (epoch nanoseconds) only if the run is alive: else its end is read as a death."""
    findings: list[Finding] = []
    scope = Scope(now_ns=now_ns, manifest=manifest, stacks_dir=stacks_dir)
    store, source = source, Remembered(source)

    @cache
    def views() -> Views:
        try:
            reduced = reduced_views(store)
        except Exception as error:  # no disk for copies: the whole run is read, which takes longer
            findings.append(failed_check("records", error))
            return whole_views(source)
        copies: dict[str, Any] = {
            name: source if (view := getattr(reduced, name)) is store else Remembered(view)
            for name in ("whole", "compared", "sampled", "histories")
        }
        return replace(reduced, **copies)

    records: Mapping[Records, Callable[[], Source]] = {
        "all": lambda: source,
        "sampled": lambda: views().sampled,
        "compared": lambda: views().compared,
        "histories": lambda: views().histories,
    }
    for analysis in analyses():
        try:
            findings += analysis.run(records[analysis.records](), scope)
        except Exception as error:  # a damaged run must still give what the others see
            findings.append(failed_check(analysis.kinds[0], error))
    try:
        facts = run_facts(source, manifest, views())
        if views().looked_at:  # too many rows to compare every rank in every step
            facts["steps_compared"] = dict(views().looked_at)
        if covered := coverage(views().compared):
            facts["steps_not_measured_ratio"] = round(covered.not_measured_ratio, 4)
            facts["steps_not_compared_ratio"] = round(covered.not_compared_ratio, 4)
    except Exception as error:
        facts = {"run_id": manifest.get("run_id"), "error": f"{type(error).__name__}: {error}"[:500]}
        with contextlib.suppress(Exception):  # what may explain the error
            facts["file_problems"] = file_problems(source)
    try:
        account = goodput.measure(source, stall_policy(manifest), now_ns, views())
        if account is not None:
            facts = {**facts, "wall_s": round(account.wall_s, 3)}
    except Exception as error:
        account = None
        findings.append(failed_check("goodput", error))
    try:
        what_if = whatif.measure(views().compared)
    except Exception as error:
        what_if = None
        findings.append(failed_check("straggler", error))
    with contextlib.suppress(Exception):  # the events cannot be read, which the records say
        findings += recorded_findings(source)
    findings = _told_once(findings)
    if facts.get("no_rank_started"):  # each check would say the same
        findings = [one for one in findings if one.status != "insufficient_data"]
        findings.append(Finding.insufficient("records", "records", "No check was made: no rank had started."))
    return conclude(findings, facts, account, what_if, closed=_closed(source, findings))


def _told_once(findings: Sequence[Finding]) -> list[Finding]:
    """Without the live failures of plug-ins that have failed again, now, for the same reason."""
    again = {(f"plug-in {found.evidence['plugin']}", found.evidence.get("error")) for found in findings
             if "plugin" in found.evidence}  # fmt: skip
    return [one for one in findings if (one.evidence.get("analyzer"), one.evidence.get("error")) not in again]


def _closed(source: Source, findings: Sequence[Finding]) -> Mapping[str, str]:
    """{id: why it is over}, as far as the records can be read; of an ended run, what was over before its end."""
    with contextlib.suppress(Exception):
        ((newest,),) = source.rows("SELECT max(attempt) FROM ranks") if source.has("ranks") else ((None,),)
        return closed_findings(findings, reported_findings(source), newest_attempt=newest)
    return {}


def conclude(
    findings: Sequence[Finding],
    facts: Mapping[str, Any],
    account: goodput.Account | None = None,
    what_if: whatif.WhatIf | None = None,
    *,
    closed: Mapping[str, str] = MappingProxyType({}),
) -> Diagnosis:
    """The findings in order and the sentence on top; also for input that Rankscope did not record (`sources`).

    `closed`: {id: why} of findings that are over. What is still wrong comes before them, here and on the pages.
    """

    def place(finding: Finding) -> tuple[bool, bool, tuple[int, ...]]:
        return finding.status not in ("fired", "suspect"), finding.id in closed, reading_order(finding)

    ordered = tuple(sorted(map(_redacted, findings), key=place))
    facts = _REDACTOR.within(facts)
    return Diagnosis(
        run=facts, verdict=verdict(ordered, facts, what_if, closed=closed), findings=ordered, goodput=account,
        what_if=what_if, closed={finding.id: closed[finding.id] for finding in ordered if finding.id in closed},
    )  # fmt: skip


def _redacted(finding: Finding) -> Finding:
    """The finding without secrets: its texts may be an exception's, a log's or a stack's. People paste reports."""
    return replace(
        finding,
        summary=_REDACTOR(finding.summary),
        cause=_REDACTOR(finding.cause),
        evidence=_REDACTOR.within(finding.evidence),
    )


def reaching(findings: Sequence[Finding], severity: Severity) -> list[Finding]:
    """Return the fired findings that are at least as severe (`--fail-on`), the worst first."""
    limit = SEVERITIES.index(severity)
    found = [one for one in findings if one.status == "fired" and SEVERITIES.index(one.severity) <= limit]
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def reading_order(finding: Finding) -> tuple[int, int, bool, int, int, int]:
    """Key of the order in which findings are read: that of the verdict, and of every list of them. Those of a plug-in
    come after Rankscope's of the same severity."""
    return (
        _STATUS_ORDER[finding.status],
        SEVERITIES.index(finding.severity),
        finding.kind not in OUR_KINDS,
        _place_of(finding.kind),
        finding.attempt or 0,
        finding.first_step or 0,
    )


@cache
def _place_of(kind: str) -> int:
    """Place of a kind in the verdict; the last one for kinds that are not known."""
    return next((place for place, name in enumerate(KINDS) if name == kind), len(KINDS))


def failed_check(kind: str, error: Exception, of: str = "run") -> Finding:
    """What an analysis that raised an error leaves: its kind was not judged."""
    message = str(error).strip().rstrip(".").replace(";", ",")[:200]
    return Finding(
        analyzer=kind,
        kind=kind,
        severity="info",
        status="insufficient_data",
        summary=f"The check for {kind} failed on this {of}: {type(error).__name__}: {message}.",
        evidence={"error_type": type(error).__name__, "error": str(error)[:2000]},
        advice="analyzer-failed",
    )
