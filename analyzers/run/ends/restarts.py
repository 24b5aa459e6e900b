"""Sentence on the restart that followed an attempt, for the summary of a hang or a death."""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.source import Source

__all__ = ["restart_sentence"]


def restart_sentence(source: Source, attempt: int, attempts: Sequence[int]) -> str:
    """Return ` Restarted as attempt 1 from step 30.`; empty for the newest of the run's `attempts`."""
    after = next((number for number in attempts if number > attempt), None)
    if after is None:
        return ""
    ((step,),) = source.rows("SELECT min(step) FROM steps WHERE attempt = ?", [after])
    if step is None:
        return f" Restarted as attempt {after}."
    # The steps of an attached script are counted from its start; only its own checkpoint knows where it resumed.
    return f" Restarted as attempt {after}{', whose steps count from' if step <= 1 else ' from step'} {step}."
