"""Restart that followed an attempt: the checkpoint it loaded, and the sentence for the summary of a hang or a death."""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.run.records.event_log import Event, EventLog
from analyzers.source import Source
from probes.tape import event_kinds

__all__ = ["loaded_checkpoint", "restart_sentence"]


def loaded_checkpoint(log: EventLog, attempt: int) -> Event | None:
    """Event of the checkpoint with which an attempt began; None if none was loaded. Later checkpoints are loaded by
    rollbacks."""
    # A load of tier "remote" is a download. Afterwards the ranks load the downloaded folder from disk, or an older one
    # if it is damaged.
    loads = (event for event in log.of(event_kinds.CHECKPOINT, attempt=attempt) if event.text("state") == "loaded")
    return next((event for event in loads if event.text("tier") != "remote"), None)


def restart_sentence(source: Source, attempt: int, attempts: Sequence[int]) -> str:
    """Return ` Restarted as attempt 1 from step 30.` The checkpoint is of step 30, so step 31 is trained first.

    Empty for the newest of the run's `attempts`.
    """
    after = next((number for number in attempts if number > attempt), None)
    if after is None:
        return ""
    restarted = f" Restarted as attempt {after}"
    loaded = loaded_checkpoint(EventLog.load(source, (event_kinds.CHECKPOINT,), after), after)
    if loaded is not None and loaded.step is not None:
        return f"{restarted} from step {loaded.step}."
    ((step,),) = source.rows("SELECT min(step) FROM steps WHERE attempt = ?", [after])
    if step is None:
        return f"{restarted}."
    # Steps of an attached script are counted from its start; only the script's checkpoint has the step from which it
    # resumed.
    return f"{restarted}, whose {'steps count from' if step <= 1 else 'first step is'} {step}."
