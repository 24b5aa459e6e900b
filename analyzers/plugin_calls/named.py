"""The plug-in of a finding, and the limit on how many findings of one plug-in a list shows.

plugin_name(finding)            # "plateau"; empty for a finding of Rankscope
folded(findings, 3)             # the first three of each kind of a plug-in, with "17 more" on the third
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from analyzers.finding import Finding
from analyzers.kinds import OUR_KINDS

__all__ = [
    "MAX_IN_VERDICT",
    "MAX_OF_A_KIND",
    "failed_plugin",
    "first_of",
    "folded",
    "of_plugin",
    "plugin_name",
    "with_note",
]

MAX_OF_A_KIND = 3
"""Maximum number of findings of one kind of a plug-in that a page or a terminal shows; JSON has all."""
MAX_IN_VERDICT = 1
_BY = "plug-in "
_NOTE = re.compile(r" \(((?:recorded live by (?:a )?)?plug-in [^()]*)\)\.?$")


def of_plugin(finding: Finding, name: str) -> Finding:
    """Mark a finding with the plug-in that returned it, in `analyzer` and in the summary."""
    return replace(finding, analyzer=f"{_BY}{name}", summary=with_note(finding.summary, f"{_BY}{name}"))


def plugin_name(finding: Finding) -> str:
    """Name of the plug-in that made the finding; empty if Rankscope made it."""
    return finding.analyzer.removeprefix(_BY) if finding.analyzer.startswith(_BY) else ""


def failed_plugin(finding: Finding) -> str:
    """Name of the plug-in whose failure the finding reports, now or while the run was live; empty for other
    findings."""
    live = str(finding.evidence.get("analyzer", ""))
    return str(finding.evidence.get("plugin") or (live.removeprefix(_BY) if live.startswith(_BY) else ""))


def with_note(summary: str, note: str) -> str:
    """The summary with this note in parentheses at its end; an earlier note is replaced."""
    return f"{_NOTE.sub('', summary).rstrip('.')} ({note})."


def folded(findings: Sequence[Finding], limit: int) -> list[Finding]:
    """Keep the first `limit` findings of each kind of a plug-in, because a plug-in may return any number. The last
    finding that is kept says how many more there are.
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.kind not in OUR_KINDS:
            groups.setdefault((finding.analyzer, finding.kind), []).append(finding)
    counts = {id(group[limit - 1]): len(group) - limit for group in groups.values() if len(group) > limit}
    left_out = {id(finding) for group in groups.values() for finding in group[limit:]}
    shown = [finding for finding in findings if id(finding) not in left_out]
    return [_with_more(finding, counts[id(finding)]) if id(finding) in counts else finding for finding in shown]


def first_of(findings: Sequence[Finding], limit: int) -> list[Finding]:
    """The first `limit` findings; if all of them are from plug-ins, the last is replaced by Rankscope's first."""
    shown = list(findings[:limit])
    if len(shown) == limit and all(one.kind not in OUR_KINDS for one in shown):
        shown[-1:] = [next((one for one in findings if one.kind in OUR_KINDS), shown[-1])]
    return shown


def _with_more(finding: Finding, number: int) -> Finding:
    note = _NOTE.search(finding.summary)
    words = note[1] if note else f"{_BY}{plugin_name(finding)}"
    return replace(finding, summary=with_note(finding.summary, f"{words}, {number} more"))
