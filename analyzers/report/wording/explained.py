"""The evidence of a finding and the next step, one sentence each, the same in every report.

    why(finding)          # "Against its peers: forward 1.49x. It caused 35 % of the waiting in collectives."
    next_step(finding)    # "Check clocks ... on the host of rank 3. See `rankscope explain straggler-compute`."

Each package of `analyzers` explains its own kinds, in `explain.WHY` and `explain.NEXT`.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from collections.abc import Callable, Mapping
from functools import cache, partial

from analyzers.finding import Finding, evidence_of
from analyzers.kinds import KINDS, OUR_KINDS
from analyzers.plugin_calls.calls import explain as explain_by_plugin
from analyzers.plugin_calls.named import plugin_name
from analyzers.report.runbook_sections import explain_command
from analyzers.whatif.what_if import exceeds_error
from analyzers.wording import is_number

__all__ = ["next_step", "why"]

_RUN = " RUN "
"""Placeholder for the run in a command of an explanation."""
Explanations = Mapping[str, Callable[[Finding], str]]


def why(finding: Finding) -> str:
    """The evidence of a finding in one sentence. This is the line of a file that shows it. Without such a line, it is
    the sentence of the finding's package, or else the summary.
    """
    if finding.kind in OUR_KINDS and (basis := finding.evidence.get("basis")):
        return f"{str(basis).rstrip('.')}."
    explain = _explanation(finding.kind, "WHY")
    return (explain(finding) if explain is not None else "") or finding.summary


def next_step(finding: Finding, run: object = "") -> str:
    """The next step, the first command that would settle a suspicion, and the command that prints the runbook.

    `run`: what commands get as the run. It is the run's folder, or the run's name if the folder is not known.
    """
    explain = _explanation(finding.kind, "NEXT")
    advice = str(finding.evidence.get("do") or "") if finding.kind in OUR_KINDS else ""
    if not advice and explain is not None:
        advice = explain(finding)
    if finding.kind not in KINDS:
        what = f"plug-in {plugin}" if (plugin := plugin_name(finding)) else "what found it"
        advice = f"Install {what} here to see what it advises."
    if run and finding.kind in OUR_KINDS:
        advice = advice.replace(_RUN, f" {shlex.quote(str(run))} ")
    where = f"See `{explain_command(finding.advice)}`." if finding.advice else ""
    return " ".join(part for part in (advice, _settling(finding), _gain(finding), where) if part)


def _settling(finding: Finding) -> str:
    collect = finding.evidence.get("collect") if finding.kind in OUR_KINDS and finding.status == "suspect" else None
    return f"To settle it: {collect[0]}." if isinstance(collect, list) and collect else ""


@cache
def _explanation(kind: str, name: str) -> Callable[[Finding], str] | None:
    known = KINDS.get(kind)
    if known is None:
        return None
    if not known.package:
        return partial(explain_by_plugin, name)
    if importlib.util.find_spec(f"analyzers.{known.package}.explain") is None:
        return None
    explanations: Explanations = getattr(importlib.import_module(f"analyzers.{known.package}.explain"), name)
    return explanations.get(kind)


def _gain(finding: Finding) -> str:
    """Say how much faster the run would be without the finding's cause, if that gain exceeds the error of the
    prediction; otherwise say why no gain is claimed, or return "".
    """
    evidence = evidence_of(finding)
    withheld = evidence.get("whatif_withheld")
    if isinstance(withheld, str) and withheld:
        return f"The time without it is not predicted: {withheld}."
    gain, error = evidence.get("speedup_without_it_ratio"), evidence.get("replay_error_ratio")
    if gain is None or not is_number(gain):
        return ""
    if error is None or not is_number(error):  # no step was replayed
        return f"{_steps(finding)} would be {gain:.2f}x faster without it."
    if not exceeds_error(gain, error):
        return ""
    return f"{_steps(finding)} would be {gain:.2f}x faster without it (prediction error {100 * error:.1f} %)."


def _steps(finding: Finding) -> str:
    """The steps to which the prediction applies. These are the replayed steps: the newest steps in which the rank was
    slow."""
    replayed = (finding.evidence.get("replayed_first_step"), finding.evidence.get("replayed_last_step"))
    first, last = (finding.first_step, finding.last_step) if None in replayed else replayed
    return "The run" if first is None or last is None else f"Steps {first} to {last}"
