"""Finds saves that stop training for longer than a team allows."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.api import Analysis, Finding, Kind, Scope, Source, lacking, typed

__all__ = ["ANALYSES", "KINDS", "NEXT", "WHY", "SlowSavePolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSavePolicy:
    """The team's limit."""

    most_s: float = 2.0
    """Longest time in which a save may stop training (seconds). Source: the team's service level."""


def slow_saves(source: Source, scope: Scope, policy: SlowSavePolicy = SlowSavePolicy()) -> list[Finding]:
    """One finding for the longest save above the limit."""
    if lacking(source, steps=("checkpoint_ns",)):
        return []
    rows = source.rows(
        "SELECT attempt, rank, step, checkpoint_ns / 1e9 FROM steps WHERE checkpoint_ns IS NOT NULL AND rank >= 0 "
        "ORDER BY checkpoint_ns DESC LIMIT 1"
    )
    return [
        Finding(
            analyzer="slow_save",
            kind="slow_save",
            severity="warning",
            status="fired",
            attempt=attempt,
            ranks=(rank,),
            first_step=step,
            summary=f"Rank {rank} stopped training for {took_s:.1f} s to save at step {step}.",
            evidence={"save_s": took_s, "limit_s": policy.most_s},
        )
        for attempt, rank, step, took_s in typed(rows, int, int, int, float)
        if took_s > policy.most_s
    ]


KINDS = (Kind(name="slow_save", title="Slow save"),)
ANALYSES = (Analysis(kinds=("slow_save",), run=slow_saves, live="periodic"),)
WHY = {
    "slow_save": lambda f: f"The limit is {f.value('limit_s', float):.0f} s; it took {f.value('save_s', float):.1f} s."
}
NEXT = {"slow_save": lambda f: "Check the file system, or save in the background."}
