"""The verdict: the summary of a run at the top of its report.

    verdict(findings, facts, what_if)      # "No problems found (200 steps, 4 ranks)."

The verdict claims no more than the evidence. If too much of a run's time was not measured or not compared, it does not
say "no problems found". It mentions a gain in the what-if that no finding explains, and says if an advice does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from analyzers.finding import Finding
from analyzers.kinds import OUR_KINDS
from analyzers.plugin_calls.named import MAX_IN_VERDICT, failed_plugin, first_of, folded
from analyzers.policy import SHARED
from analyzers.run.records.file_problems import losses
from analyzers.whatif.what_if import WhatIf
from analyzers.wording import counted, ranks_text, recorded_ranks

__all__ = ["ALREADY_OVER", "LISTED_BELOW", "outcome", "verdict", "without_unjudged"]

LISTED_BELOW = "see Not judged"
"""Reference to the list of checks that were not made, which every report has under this heading."""
ALREADY_OVER = "Already over: "
"""Prefix of a closed finding's sentence. Open findings come first: a verdict that begins with it has none."""
_LISTED = re.compile(rf"\s*\b\d+ checks? needs? more data: {LISTED_BELOW}\.")
MAX_LINES = 3
"""Maximum number of findings after the first that get a line in the verdict."""
_FIRST_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
CLEAN = "No problems found"
INCOMPLETE = "Records incomplete: "
EXPLAINS_GAIN = ("straggler", "stage_imbalance", "data_bound", "expert_imbalance")
"""Kinds of findings that explain why balanced ranks would be faster."""


def verdict(
    findings: Sequence[Finding],
    facts: Mapping[str, Any],
    what_if: WhatIf | None = None,
    *,
    closed: Collection[str] = (),
) -> str:
    """Return the first finding's summary, then one line per further finding, then the checks that were not made.

    `findings` are in reading order; findings that are over come last (`closed` has their ids).
    """
    wrong = [finding for finding in findings if finding.status in ("fired", "suspect")]
    failed = {plugin for finding in findings if (plugin := failed_plugin(finding))}
    unjudged = {f.kind for f in findings if f.status == "insufficient_data" and not failed_plugin(f)}
    missing = f"{_checks(len(unjudged))} more data: {LISTED_BELOW}." if unjudged else ""
    if failed:
        missing = f"{missing} {_plugins(sorted(failed))} problems: {LISTED_BELOW}.".lstrip()
    incomplete = _incomplete(facts)
    if wrong and wrong[0].summary.startswith(INCOMPLETE):
        incomplete = incomplete.removeprefix(INCOMPLETE)
    missing = f"{incomplete} {missing}".strip()
    gain = _gain(findings, what_if)
    if wrong:
        shown = _by_plugin(wrong)
        first, *further = first_of(shown, 1 + MAX_LINES)
        others = _further(further, closed, left=len(shown) - 1 - len(further))
        # The verdict on a dead or hanging run says nothing about its speed, except in the what-if line.
        if wrong[0].severity == "critical" and wrong[0].kind in OUR_KINDS:
            gain = ""
        last = " ".join(part for part in (gain, missing) if part)
        opening = f"{ALREADY_OVER if first.id in closed else ''}{first.summary}"
        return "\n".join(part for part in (opening, *others, last) if part)
    extent = [part for part in (counted(facts.get("steps"), "step"), recorded_ranks(facts)) if part]
    seen = f" ({', '.join(extent)})" if extent else ""
    reservation = _unjudged_time(facts) or _not_recorded(findings, unjudged, facts)
    clean = f"Nothing was found{seen}, but {reservation}." if reservation else f"{CLEAN}{seen}."
    if "files_read" in facts and unjudged:
        clean = f"Nothing was found{seen} in what could be judged."
    if gain and not reservation:
        clean = f"Nothing was found{seen}."
    if incomplete:
        clean = f"Nothing was found{seen} in the records that are left."
    if "straggler" in unjudged and not facts.get("steps"):
        lost = _lost_steps(facts)
        clean = f"Nothing was found{seen}, but no step is recorded{f': {lost}' if lost else ''}."
    if facts.get("is_judged") is False or (not extent and _nothing_read(facts)):
        clean, missing = _nothing_judged(findings, facts), ""
    if facts.get("ended") == "failed":  # a failed run must never be reported with "no problems found"
        when = "failed" if facts.get("steps") else "failed before its first step"
        clean = f"The run {when}, and its records do not show why. Read the logs of its ranks."
    if facts.get("no_rank_started"):
        clean, missing = _unstarted(facts), ""
    advised = sum(finding.status == "advice" for finding in findings)
    advice = f"{advised} piece{'s' * (advised > 1)} of advice." if advised else ""
    return " ".join(part for part in (clean, gain, advice, _preempted(facts), missing) if part)


def outcome(text: str, facts: Mapping[str, Any]) -> Literal["clean", "failed", "unjudged"]:
    """Return the mark of a verdict `text` without findings: clean only if steps were judged without reservation and the
    run did not fail.
    """
    if facts.get("ended") == "failed":
        return "failed"
    return "clean" if facts.get("steps") and text.startswith(CLEAN) else "unjudged"


def without_unjudged(text: str) -> str:
    """The verdict without the number of checks that were not made. It is for places where no list of these checks
    follows."""
    return _LISTED.sub("", text)


def _unstarted(facts: Mapping[str, Any]) -> str:
    """Sentence on a launch that ended before any rank started, with the recorded reason."""
    code, message = facts.get("exit_code"), str(facts.get("end_message") or "").rstrip(". ")
    if not facts.get("ended"):
        return "No rank had started when the records end: the launch was killed, crashed or has just begun."
    how = f"with code {code} " if code is not None else ""
    return f"The launch ended {how}before any rank had started{f': {message}' if message else ''}."


def _by_plugin(findings: Sequence[Finding]) -> list[Finding]:
    """Fold the findings of each kind of a plug-in, which may be many, into one: its first sentence and their number."""
    shown = []
    for finding in folded(findings, MAX_IN_VERDICT):
        text, note, _ = finding.summary.rpartition(" (") if finding.kind not in OUR_KINDS else ("", "", "")
        first = _FIRST_SENTENCE.split(text, maxsplit=1)[0].rstrip(".")
        shown.append(
            replace(finding, summary=f"{first}{note}{finding.summary[len(text) + len(note) :]}") if text else finding
        )
    return shown


def _further(findings: Sequence[Finding], closed: Collection[str], *, left: int) -> list[str]:
    """A line for each finding after the first, and the number of those without a line."""
    lines = [
        f"{ALREADY_OVER if finding.id in closed else ''}{_FIRST_SENTENCE.split(finding.summary, 1)[0]}"
        for finding in findings
    ]
    return [*lines, f"{left} more finding{'s' * (left > 1)}."] if left > 0 else lines


def _plugins(names: Sequence[str]) -> str:
    return f"Plug-in {names[0]} has" if len(names) == 1 else f"{len(names)} plug-ins have"


def _checks(number: int) -> str:
    return "1 check needs" if number == 1 else f"{number} checks need"


def _incomplete(facts: Mapping[str, Any]) -> str:
    """Sentence on record files that were lost, truncated or altered, so that their content was not judged."""
    problems = [one for one in losses(facts.get("file_problems") or ()) if one["path"].startswith("tapes/")]
    if not problems:
        return ""
    first = problems[0]
    name, others = str(first["path"]).removesuffix("#checksum"), len(problems) - 1
    more = f", and {others} more file{'s' * (others > 1)}" if others else ""
    return f"{INCOMPLETE}{name} ({first['problem']}){more}."


def _nothing_judged(findings: Sequence[Finding], facts: Mapping[str, Any]) -> str:
    """Sentence on files in which nothing was judged, with the first check's reason. If no check gives one, it is the
    problem of a file."""
    reasons = list(dict.fromkeys(one.summary for one in findings if one.status == "insufficient_data"))
    if reasons:
        more = f" {_checks(len(reasons) - 1)} more data: {LISTED_BELOW}." if len(reasons) > 1 else ""
        return f"Nothing was judged. {reasons[0]}{more}"
    problem = next((f": {one['path']} {one['problem']}" for one in facts.get("file_problems") or ()), "")
    return f"Nothing was judged{problem or ': the contents of these files are unknown or unreadable'}."


def _nothing_read(facts: Mapping[str, Any]) -> bool:
    """Return True if every file that was read has a problem."""
    read = facts.get("files_read")
    problems = {found.get("path") for found in facts.get("file_problems") or ()}
    return isinstance(read, Mapping) and 0 < sum(read.values()) <= len(problems)


def _preempted(facts: Mapping[str, Any]) -> str:
    """Sentence on a stop by the scheduler: no failure, but the reason why the run is incomplete."""
    if facts.get("ended") != "preempted":
        return ""
    step = facts.get("preempted_at_step")
    saved = f"and saved at step {step}" if step is not None else "and nothing was saved"
    return f"The run was preempted (SIGTERM) {saved}: continue with `rankscope train --resume`."


def _unjudged_time(facts: Mapping[str, Any]) -> str:
    """Clause on time that was not judged, if it is too much to say "no problems found"; else empty."""
    not_measured = facts.get("steps_not_measured_ratio") or 0.0
    not_compared = facts.get("steps_not_compared_ratio") or 0.0
    if not_measured + not_compared <= SHARED.cost_ratio:
        return ""
    parts = [
        (not_measured, "was not measured"),
        (not_compared, "was host time between phases on GPU ranks, which is not compared"),
    ]
    shown = [f"{100 * ratio:.0f} % {what}" for ratio, what in parts if ratio >= 0.005]
    return f"of the step time, {' and '.join(shown)}"


def _not_recorded(findings: Sequence[Finding], unjudged: Collection[str], facts: Mapping[str, Any]) -> str:
    """Clause on ranks without records, or on a check for deaths or hangs without input; else empty."""
    silent = sorted({rank for found in findings if found.kind == "records" for rank in found.ranks})
    if silent:
        return f"{ranks_text(silent)} left no records of steps"
    if "rank_lost" in unjudged and facts.get("steps") and not facts.get("ended"):
        return "how the ranks ended could not be checked"
    if lost := _lost_steps(facts):
        return lost
    has_peers = (facts.get("num_ranks") or 0) > 1 and facts.get("steps")
    return "hangs could not be checked" if has_peers and "hang" in unjudged else ""


def _lost_steps(facts: Mapping[str, Any]) -> str:
    """Clause on records of steps that the ranks could not write; empty if none."""
    lost = counted((facts.get("dropped_records") or {}).get("steps"), "record")
    return f"{lost} of steps could not be written to the disk" if lost else ""


def _gain(findings: Sequence[Finding], what_if: WhatIf | None) -> str:
    """Sentence on a gain in the what-if that no finding explains. If an advice explains it, the sentence says so."""
    explained_by = {found.status for found in findings if found.kind in EXPLAINS_GAIN}
    if what_if is None or not what_if.is_beyond_error or explained_by & {"fired", "suspect"}:
        return ""
    if what_if.gain < 1 + SHARED.min_gain_ratio:
        return ""
    why = "the advice says why" if "advice" in explained_by else "no finding explains why"
    return f"Balanced ranks would be {what_if.gain:.2f}x faster, and {why}."
