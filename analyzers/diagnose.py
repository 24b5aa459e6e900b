"""All findings of the analyzers on a run, and the verdict.

    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest(), stacks_dir=run.stacks)
    diagnosis.verdict          # "Rank 3 was slow from step 60 to the end: +19 ms of compute per step (1.28x)."
    diagnosis.fired            # findings of problems: open ones first, the worst of them on top

`analyzers.analysis` collects the analyses from `ANALYSES` of each `analyzers/<package>/analyze.py`. If one fails, its
findings become one `insufficient_data` with the error; the others are not affected.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
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
from analyzers.run.findings.open_findings import closed_findings, recorded_findings, reported_findings
from analyzers.run.findings.past_tense import at_run_end, over
from analyzers.run.policy import stall_policy
from analyzers.run.records.cached_source import CachedSource
from analyzers.run.records.file_problems import file_problems, losses
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.verdict.run_facts import run_facts
from analyzers.verdict.verdict import verdict
from probes.tape.redaction.printable import escaped
from probes.tape.redaction.secrets import Redactor

# Relative imports, as in all modules whose types `rankscope.api` returns, so that a type checker can follow them in a
# wheel, where this package is `rankscope.analyzers`.
from .account import goodput
from .finding import SEVERITIES, Finding, Severity
from .whatif import what_if as whatif

__all__ = ["SCHEMA_VERSION", "Diagnosis", "conclude", "diagnose", "failed_check", "reaching", "reading_order"]

SCHEMA_VERSION = 2
"""Version of the JSON report, raised if readers of the previous version would misread it. Since version 2 the id of a
finding consists of the identity fields of its kind (`straggler-0-r3`), and no longer contains its first step."""
_STATUS_ORDER = {"fired": 0, "suspect": 1, "advice": 2, "ok": 3, "insufficient_data": 4}
_REDACTOR = Redactor()
_RECORDED = re.compile(r"\.\d+\.tape(#checksum)?$|^run\.json$")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis:
    """A run's facts, the verdict, and all findings in reading order."""

    run: Mapping[str, object]
    """Facts of the run (`run_facts`): run_id, steps, num_ranks, how it ended, `file_problems` and others."""
    verdict: str
    """What went wrong and on which rank: the first finding's sentences, and a line for each further one."""
    findings: tuple[Finding, ...]
    """All findings in reading order; `fired`, `advised` and `not_judged` are parts of it."""
    goodput: goodput.Account | None = None
    """Account of the wall time; None if no step was recorded."""
    what_if: whatif.WhatIf | None = None
    """What stragglers cost the job; None with one rank or too few steps."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """{id of a finding: why it is over}."""

    @property
    def fired(self) -> tuple[Finding, ...]:
        """Findings of problems, certain or suspected."""
        return tuple(finding for finding in self.findings if finding.status in ("fired", "suspect"))

    @property
    def cards(self) -> tuple[Finding, ...]:
        """The findings of `fired` to show. Of each kind of a plug-in, only the first three are kept. The third of them
        says how many more there are."""
        return tuple(folded(self.fired, MAX_OF_A_KIND))

    @property
    def advised(self) -> tuple[Finding, ...]:
        """Advice: nothing is broken, but something could be improved."""
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
    def damaged_records(self) -> tuple[Mapping[str, str], ...]:
        """Tape segments and `run.json` if records in them could not be read: `path` and `problem`."""
        facts: Mapping[str, Any] = self.run
        return tuple(found for found in losses(facts.get("file_problems", ())) if _RECORDED.search(found["path"]))


def diagnose(
    source: Source,
    manifest: Mapping[str, Any],
    *,
    now_ns: int | None = None,
    stacks_dir: Path | None = None,
) -> Diagnosis:
    """Run every analysis. `now_ns`: the present (epoch nanoseconds) if the run is alive; without it, the end of the
    records counts as the end of the run, and may be read as a death.
    """
    findings: list[Finding] = []
    scope = Scope(now_ns=now_ns, manifest=manifest, stacks_dir=stacks_dir)
    store, source = source, CachedSource(source)

    @cache
    def views() -> Views:
        try:
            reduced = reduced_views(store)
        except Exception as error:  # for example, no disk space for copies: then read the whole run
            findings.append(failed_check("records", error))
            return whole_views(source)
        copies: dict[str, Any] = {
            name: source if (view := getattr(reduced, name)) is store else CachedSource(view)
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
        except Exception as error:  # the other analyses must still report on a damaged run
            findings.append(failed_check(analysis.kinds[0], error))
    try:
        facts = run_facts(source, manifest, views())
        if views().coverage:  # too many rows to compare every rank in every step
            facts["steps_compared"] = dict(views().coverage)
        if covered := coverage(views().compared):
            facts["steps_not_measured_ratio"] = round(covered.not_measured_ratio, 4)
            facts["steps_not_compared_ratio"] = round(covered.not_compared_ratio, 4)
    except Exception as error:
        facts = {"run_id": manifest.get("run_id"), "error": f"{type(error).__name__}: {error}"[:500]}
        with contextlib.suppress(Exception):  # problems of the files may explain the error
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
    with contextlib.suppress(Exception):  # the events cannot be read; another finding reports that
        findings += recorded_findings(source)
    findings = _without_repeats(findings)
    if facts.get("no_rank_started"):  # every check lacks records for this same reason, so one finding is enough
        findings = [one for one in findings if one.status != "insufficient_data"]
        findings.append(Finding.insufficient("records", "records", "No check was made: no rank had started."))
    closed, has_ended = _closed(source, findings), now_ns is None
    return conclude(findings, facts, account, what_if, closed=closed, has_ended=has_ended)


def _without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """Drop a plug-in's failure that `watch` reported if the plug-in has failed here with the same error."""
    fail_now = {(f"plug-in {found.evidence['plugin']}", found.evidence.get("error")) for found in findings
             if "plugin" in found.evidence}  # fmt: skip
    return [one for one in findings if (one.evidence.get("analyzer"), one.evidence.get("error")) not in fail_now]


def _closed(source: Source, findings: Sequence[Finding]) -> Mapping[str, str]:
    """{id of a finding: reason why it is over}, as far as the records can be read. For a run that has ended, only
    findings that were over before the end."""
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
    has_ended: bool = False,
) -> Diagnosis:
    """Order the findings and add the verdict. Input that Rankscope did not record is concluded in the same way
    (`sources`).

    `closed`: {id: why} of findings that are over. Open ones come before them, here and on the pages. `has_ended`: also
    put findings that were open at the run's end into the past tense.
    """
    findings = [_at_present(finding, closed, facts, has_ended=has_ended) for finding in findings]

    def place(finding: Finding) -> tuple[bool, bool, tuple[int, ...]]:
        return finding.status not in ("fired", "suspect"), finding.id in closed, reading_order(finding)

    ordered = tuple(sorted(map(_redacted, findings), key=place))
    facts = _REDACTOR.within(facts)
    return Diagnosis(
        run=facts, verdict=verdict(ordered, facts, what_if, closed=closed), findings=ordered, goodput=account,
        what_if=what_if, closed={finding.id: closed[finding.id] for finding in ordered if finding.id in closed},
    )  # fmt: skip


def _at_present(finding: Finding, closed: Collection[str], facts: Mapping[str, Any], *, has_ended: bool) -> Finding:
    """Return the finding, in the past tense if it is over or if its run has ended."""
    if finding.status not in ("fired", "suspect"):
        return finding
    if finding.id in closed:
        return over(finding, finding.last_step)
    if not has_ended:
        return finding
    return at_run_end(finding, facts.get("steps") if facts.get("attempts") == 1 else None)


def _redacted(finding: Finding) -> Finding:
    """Redact secrets in a finding, because people paste reports. Its texts may come from exceptions, logs or stacks."""
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
    """Sort key of findings, in the verdict and in lists. A plug-in's come after Rankscope's of equal severity."""
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
    """Place of a kind in the verdict; unknown kinds come last."""
    return next((place for place, name in enumerate(KINDS) if name == kind), len(KINDS))


def failed_check(kind: str, error: Exception, subject: str = "run") -> Finding:
    """Finding for an analysis that raised an error: its kind was not judged. `subject`: what was analyzed."""
    message = str(error).strip().rstrip(".").replace(";", ",")[:200]
    return Finding(
        analyzer=kind,
        kind=kind,
        severity="info",
        status="insufficient_data",
        summary=f"The check for {kind} failed on this {subject}: {type(error).__name__}: {message}.",
        evidence={"error_type": type(error).__name__, "error": str(error)[:2000]},
        advice="analyzer-failed",
    )
