"""Summaries of findings in the past tense. While a finding is open, its summary is in the present tense.

    in_past("Rank 3 has been slow since step 60: +19 ms.", "to 149")    # "Rank 3 was slow from step 60 to 149: +19 ms."
    over(finding).summary           # for a finding that is over: up to its last step
    at_run_end(finding).summary     # for a finding that was open when its run ended: up to the end

Steps and numbers do not change, and neither does a sentence without a verb or clause that is listed here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.policy import SHARED

__all__ = ["OVER", "at_run_end", "in_past", "over"]

OVER = "Over: "
"""Start of the summary of a report that a finding is over."""

_BE = {"has": "was", "have": "were"}
_FROM_STEP = r"(?P<since>(?:since|from) step \d+(?:, the first (?:one \w+|recorded))?|from the first step)"
_SLOW = r"slow(?:er)?(?: \d+ times| in turn| in communication)?"
_LASTING: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(rf"\b(?P<be>has|have) been (?P<what>{_SLOW}) {_FROM_STEP}"), "{be} {what} {since}"),
    (re.compile(rf"\b(?:has|have) (?P<what>paused in \S+ % of the steps) {_FROM_STEP}"), "{what} {since}"),
    (re.compile(rf"\bhave (?P<what>waited for data \S+ % of the time) {_FROM_STEP}"), "{what} {since}"),
)
"""Clauses on a condition that has lasted since a step."""
_VERBS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), past)
    for pattern, past in (
        (r"\b(?:has|have) become slower\b", "became slower"),
        (r"\btakes (?=[\d.]+x as long as)", "took "),
        (r"\bgrows by\b", "grew by"),
        (r"\bhas (?=[\d.]+ GiB free\b)", "had "),
        (r"\bat the current rate\b", "at that rate"),
        (r"(?<= )are padding\b", "were padding"),
        (r"\bOut of memory in (?=[\d,]+ steps)", "Out of memory would have followed in "),
        (r"\bcheckpoint is of step\b", "checkpoint was of step"),
        (r"(?<=steps) ago(?=, with one due)", " earlier"),
        (r"\bA failure now costs\b", "A failure would have cost"),
        (r"\bdo(?:es)? not (?=respond\b|return\b)", "did not "),
        (r"\bhangs? (?=in the data loader|in evaluation|writing a checkpoint)", "hung "),
        (r"\b(?:has|have) not (?=finished compiling\b|reported since\b)", "had not "),
        (r"\bmakes? no progress\b", "made no progress"),
        (r"\bstill wait in\b", "still waited in"),
        (r"\bwaits? for (?=each other\b|ranks? \d)", "waited for "),
        (r"\bis (?=stopped\b|stuck\b|down\b|at step\b|ahead of\b)", "was "),
        (r"\bare (?=stopped\b|stuck\b|at step\b|ahead of\b)", "were "),
    )
)
"""Other present-tense verbs of findings that can be over (`analyzers.kinds`) or belong to an attempt that can."""


def in_past(summary: str, until: str) -> str:
    """The summary in the past tense. `until` ends a clause on a condition that has lasted since a step: "to 149",
    "to the end", or "on" if the last step is unknown."""
    for pattern, form in _LASTING:
        summary = pattern.sub(_lasted(form, until), summary)
    for pattern, past in _VERBS:
        summary = pattern.sub(past, summary)
    return summary


def over(finding: Finding, last_step: int | None = None) -> Finding:
    """A finding that is over, with its summary in the past tense. `last_step`: its last step, if known."""
    return replace(finding, summary=in_past(finding.summary, "on" if last_step is None else f"to {last_step}"))


def at_run_end(finding: Finding, newest_step: int | None = None) -> Finding:
    """A finding that was open when its run ended, with its summary in the past tense. A finding about the end of an
    attempt, such as a hang, keeps the present tense.

    `newest_step`: that of the finding's attempt, if known. If some rank's records end long before it, ranks could be
    compared only until then, so the finding may have been over at the end.
    """
    summary, last = finding.summary, finding.last_step
    if finding.kind in KINDS and not KINDS[finding.kind].at_end:
        is_short = last is not None and newest_step is not None and last + SHARED.min_steps < newest_step
        summary = in_past(summary, f"to {last}, the last one compared" if is_short else "to the end")
    return replace(finding, summary=summary)


def _lasted(form: str, until: str) -> Callable[[re.Match[str]], str]:
    def text(found: re.Match[str]) -> str:
        named = found.groupdict()
        since = re.sub("^since ", "from ", named["since"])
        since = f"{since}," if ", " in since else since
        return f"{form.format(be=_BE.get(named.get('be', ''), ''), what=named['what'], since=since)} {until}"

    return text
