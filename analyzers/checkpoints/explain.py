"""Evidence and next step of findings on checkpoints, one or two sentences each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding
from analyzers.wording import number, percent, sentence

__all__ = ["NEXT", "WHY"]


def _why_failed(finding: Finding) -> str:
    facts = finding.evidence
    good = facts.get("num_good_since")
    words = ("copy", "copies", "copied") if facts.get("tier") == "remote" else ("save", "saves", "saved")
    since = f"{good} later {words[good != 1]} succeeded" if good else f"nothing has been {words[2]} since"
    lines = str(facts.get("reason") or "no reason was recorded").splitlines()
    return sentence(f"{lines[0][:140].replace(';', ',').rstrip('.')}, and {since}")


def _why_age(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"The last good save is {facts.get('age_steps', '?')} steps ({number(facts.get('lost_s'))} s of training) "
        f"old. A save is due every {facts.get('interval_steps', '?')} steps."
    )


def _why_cost(finding: Finding) -> str:
    facts = finding.evidence
    return (
        f"{facts.get('num_saves', '?')} saves stalled training for {percent(facts.get('stall_ratio'))} of the "
        f"time. {facts.get('num_delayed', '?')} were delayed, and the longest took "
        f"{number(facts.get('longest_save_s'))} s."
    )


WHY: Mapping[str, Callable[[Finding], str]] = {
    "checkpoint_failed": _why_failed,
    "checkpoint_age": _why_age,
    "checkpoint_cost": _why_cost,
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "checkpoint_failed": lambda finding: (
        "Check the address, its credentials and the service. The checkpoints on disk are not affected."
        if finding.evidence.get("tier") == "remote"
        else "Free space on the disk, or repair the file system that the reason names."
    ),
    "checkpoint_age": lambda finding: "Find out why nothing has been saved since, before the next failure.",
    "checkpoint_cost": lambda finding: "Save in the background, less often, or to a faster disk.",
}
