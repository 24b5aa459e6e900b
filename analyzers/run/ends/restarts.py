"""Sentence on the restart that followed an attempt, for the summary of a hang or a death."""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.source import Source

__all__ = ["restart_sentence"]


def restart_sentence(source: Source, attempt: int, lives: Sequence[int]) -> str:
    """` Restarted as attempt 1 from step 30.`; empty for the newest attempt of `lives`."""
    after = next((life for life in lives if life > attempt), None)
    if after is None:
        return ""
    ((step,),) = source.rows("SELECT min(step) FROM steps WHERE attempt = ?", [after])
    if step is None:
        return f" Restarted as attempt {after}."
    # Steps of a script are counted from its start: where it went on from is in its own checkpoint.
    return f" Restarted as attempt {after}{', whose steps count from' if step <= 1 else ' from step'} {step}."
