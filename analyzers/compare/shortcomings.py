"""Why a run is not called better than another, however fast it was: it did not finish, or has a critical finding.

    shortcoming(diagnosis_b, diagnosis_a)      # "has a critical finding (LOSS SPIKE)", or "" where neither is so

What both runs have decides nothing between them. An end that is not recorded is none that failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analyzers.diagnose import Diagnosis

__all__ = ["shortcoming"]

_ENDS = {
    "failed": "ended with an error",
    "given_up": "was given up",
    "launcher_lost": "lost its launcher",
    "interrupted": "was interrupted",
    "preempted": "was preempted",
}


def shortcoming(run: Diagnosis, other: Diagnosis) -> str:
    """A clause without a subject on what the run has that the other has not; "" if there is nothing."""
    found = []
    mine, others = (str(one.run.get("ended") or "") for one in (run, other))
    if mine in _ENDS and others not in _ENDS:
        step = run.run.get("steps")
        found.append(_ENDS[mine] + (f" after step {step:,}" if isinstance(step, int) else ""))
    has = {finding.kind for finding in other.fired if finding.severity == "critical"}
    kinds = [finding.kind for finding in run.fired if finding.severity == "critical" and finding.kind not in has]
    if kinds:
        named = ", ".join(dict.fromkeys(kind.replace("_", " ").upper() for kind in kinds))
        found.append(f"has a critical finding ({named})")
    return " and ".join(found)
