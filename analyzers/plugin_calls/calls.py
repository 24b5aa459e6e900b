"""Judge and explain with a plug-in, from the process that reports.

judge(plugin, 0, store, scope)      # its findings; a failure becomes a finding that says what was not judged
explain("WHY", finding)             # the plug-in's sentence
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from analyzers.finding import Finding
from analyzers.kinds import OUR_KINDS
from analyzers.plugin_calls.checked import MAX_REASONS, MAX_TEXT_CHARS, checked_findings
from analyzers.plugin_calls.named import of_plugin
from analyzers.plugins import InstalledPlugin, plugin_of
from analyzers.scope import Scope
from analyzers.source import Source
from store.plugins import MAX_REASON_CHARS, PluginError

__all__ = ["FAILED", "explain", "judge", "not_judged"]

FAILED = "plugin-failed"
"""Anchor of the runbook's section on failed plug-ins."""


def judge(plugin: InstalledPlugin, number: int, source: Source, scope: Scope) -> list[Finding]:
    """The findings of one of the plug-in's analyses, and findings of kind `records` if the analysis failed or if some
    findings were refused.
    """
    try:
        found, refused = plugin.process.call("run", number, scope, source=source, form=partial(_judged, plugin))
    except PluginError as error:
        return [not_judged(plugin, str(error))]
    return [*(_named(plugin, one) for one in found), *(not_judged(plugin, reason) for reason in refused)]


def _judged(plugin: InstalledPlugin, answer: Any) -> tuple[list[Finding], list[str]]:
    """Check the answer to `run` again, because a plug-in may have changed the checking modules in its own process."""
    returned = [Finding.of_json(one) for one in answer["findings"]]
    found, refused = checked_findings(returned, {kind["name"] for kind in plugin.kinds} - OUR_KINDS)
    reasons = [" ".join(str(one).split())[:MAX_REASON_CHARS] for one in answer["refused"][:MAX_REASONS]]
    return [Finding.of_json(one) for one in found], [*reasons, *refused]


def _named(plugin: InstalledPlugin, finding: Finding) -> Finding:
    """Mark the finding as the plug-in's; if its status is `insufficient_data`, the summary begins with the plug-in's
    name.
    """
    if finding.status != "insufficient_data":
        return of_plugin(finding, plugin.name)
    return replace(finding, summary=f"Plug-in {plugin.name}: {finding.summary}")


def not_judged(plugin: InstalledPlugin, reason: str) -> Finding:
    """Finding that names what a plug-in did not judge, and why."""
    failure = Finding.insufficient(
        plugin.name, "records", f"Plug-in {plugin.name}: {reason}.", evidence={"plugin": plugin.name, "error": reason}
    )
    return replace(failure, advice=FAILED)


def explain(part: str, finding: Finding) -> str:
    """The plug-in's sentence for a finding, or the reason why it gave none. Empty if the plug-in does not explain the
    kind."""
    plugin = plugin_of(finding.kind)
    if plugin is None:
        return ""
    if finding.kind not in plugin.explains.get(part, ()):
        return f"Plug-in {plugin.name} gives no next step." if part == "NEXT" else ""
    try:
        return str(plugin.process.call("explain", part, finding))[:MAX_TEXT_CHARS]
    except PluginError as error:
        return f"Plug-in {plugin.name} could not explain it: {error}."
