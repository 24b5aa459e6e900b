"""The findings of a run as the pages list them: the diagnosis, and what `watch` has said since it was made.

    known = known_findings(diagnosis, queries.findings_said(store), newest_attempt=1)
    known.findings                                # open ones first, the worst on top
    known.closed.get("rank_lost-0-40-r1")         # "the run went on as attempt 1"; None: it is open
    found = pick(known.findings, "straggler-0-60-r3")

A diagnosis of a live run is some seconds old; `watch` speaks within one. So what it said and the diagnosis does not
have is added, and nothing is judged here. A finding is closed when the run has gone on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from analyzers.diagnose import Diagnosis
from analyzers.finding import SEVERITIES, Finding
from analyzers.live import same_finding_key

__all__ = ["Known", "known_findings", "pick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """`findings`: fired and suspected ones in the order of reading; `closed`: id -> why it is no worry of today."""

    findings: list[Finding] = field(default_factory=list)
    closed: Mapping[str, str] = field(default_factory=dict)


def known_findings(diagnosis: Diagnosis | None, said: Sequence[Finding], *, newest_attempt: int | None = None) -> Known:
    """All of them, open ones first, then the worst; `said` by `watch`, its newest word first."""
    found = list(diagnosis.fired) if diagnosis is not None else []
    newest: dict[tuple[str, ...], Finding] = {}
    for finding in said:
        newest.setdefault(_key(finding), finding)
    closed: dict[str, str] = {}
    for word in newest.values():
        same = [finding for finding in found if _same(finding, word)]
        if word.status == "ok":
            closed |= {finding.id: "it is over" for finding in same}
        elif not same and word.status in ("fired", "suspect"):
            found.append(word)
    closed |= {finding.id: why for finding in found if (why := _why_closed(finding, newest_attempt))}
    found.sort(key=lambda f: (f.id in closed, SEVERITIES.index(f.severity), f.status == "suspect"))
    return Known(findings=found, closed=closed)


def pick(findings: Sequence[Finding], finding_id: str) -> Finding | None:
    """The finding of that id, else the one that it has become: a live straggler's first step may move."""
    exact = [finding for finding in findings if finding.id == finding_id]
    if exact:
        return exact[0]
    kind = finding_id.split("-")[0]
    ranks = [part for part in finding_id.split("-") if part[:1] == "r" and part[1:].isdigit()]
    alike = [f for f in findings if f.kind == kind and [f"r{rank}" for rank in f.ranks[:4]] == ranks]
    return alike[0] if alike else None


def _why_closed(finding: Finding, newest_attempt: int | None) -> str:
    """How the run went on from it, by what the finding itself says; empty: it is open."""
    if finding.attempt is not None and newest_attempt is not None and finding.attempt < newest_attempt:
        return f"the run went on as attempt {newest_attempt}"
    if finding.evidence.get("restored_step") is not None:
        return "the run went back and on"
    if finding.evidence.get("step_refused") is True:
        return "the step was refused"
    return "it is over" if finding.evidence.get("ongoing") is False else ""


def _key(finding: Finding) -> tuple[str, ...]:
    """What makes two words of `watch` the same finding: as it tells them apart itself, but for what may be learned of a
    straggler; what has no step is told apart by its ranks."""
    if finding.kind == "straggler":
        finding = replace(finding, cause="")
    key = same_finding_key(finding)
    if len(key) == 3 and key[2] is None:
        key = (*key, finding.ranks)
    return tuple(map(str, key))  # what stands in the evidence may be anything


def _same(told: Finding, word: Finding) -> bool:
    """Whether the diagnosis tells of what `watch` said. An event has an attempt even if its finding has none."""
    if told.kind != word.kind or (None not in (told.attempt, word.attempt) and told.attempt != word.attempt):
        return False
    if _key(replace(told, attempt=None)) == _key(replace(word, attempt=None)):
        return True
    # A live look reaches back some hundred steps, and may have seen a long one begin within it.
    if told.first_step is None or word.first_step is None or told.ranks != word.ranks:
        return False
    return told.first_step <= word.first_step <= (told.last_step or told.first_step)
