"""What the run did about a bad step: it refused the step, rolled back, or skipped a batch.

response = respond(log, attempt=0, step=40, execution=0, committed=False)
response.text        # "Rolled back to step 30 from memory in 12 ms and skipped batch 39."
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analyzers.finding import Finding
from analyzers.run.ends.restarts import loaded_checkpoint
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from analyzers.wording import batches_text, sentence
from probes.tape import event_kinds

__all__ = ["RESPONSE_EVENTS", "Response", "done_about", "respond"]

RESPONSE_EVENTS = (event_kinds.ROLLBACK, event_kinds.BATCH_SKIPPED)
_RESTART_EVENTS = (
    event_kinds.CULPRIT_KILLED,
    event_kinds.ATTEMPT_STARTED,
    event_kinds.EXCLUDED,
    event_kinds.RUN_ENDED,
    event_kinds.CHECKPOINT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Actions that were taken. The field of an action that was not taken is None or empty."""

    refused: bool | None
    restored_step: int | None
    tier: str
    skipped_batches: tuple[int, ...]
    replayed_batches: tuple[int, ...]
    duration_s: float | None

    @property
    def handled(self) -> bool:
        """True if training continued from a state that the bad step did not change."""
        return bool(self.refused) or self.restored_step is not None

    @property
    def text(self) -> str:
        """One sentence."""
        parts = []
        if self.restored_step is not None:
            took = f" in {_seconds(self.duration_s)}" if self.duration_s is not None else ""
            parts.append(f"rolled back to step {self.restored_step} from {self.tier or 'a checkpoint'}{took}")
        elif self.refused:
            parts.append("refused the step")
        if batches := batches_text(self.skipped_batches, self.replayed_batches):
            parts.append(batches)
        if parts:
            return sentence(" and ".join(parts))
        # `refused` is None while the step runs.
        return "No response is recorded." if self.refused is None else "No action was taken."

    def evidence(self) -> dict[str, object]:
        """The response as evidence of a finding."""
        return {
            "update_skipped": self.refused,
            "restored_step": self.restored_step,
            "restored_from": self.tier,
            "skipped_batches": list(self.skipped_batches),
            "replayed_batches": list(self.replayed_batches),
        }


def respond(log: EventLog, *, attempt: int, step: int, execution: int = 0, committed: bool | None = None) -> Response:
    """The response to execution number `execution` (from 0) of a step in an attempt."""
    rollbacks = [event for event in log.of(event_kinds.ROLLBACK, attempt=attempt) if event.integer("from_step") == step]
    skips = [event.integer("batch_index") for event in log.of(event_kinds.BATCH_SKIPPED, attempt=attempt, step=step)]
    rollback = rollbacks[min(execution, len(rollbacks) - 1)] if rollbacks else None
    skipped = rollback.integers("skipped_batches") if rollback else []
    restored = rollback.integer("to_step") if rollback else -1
    return Response(
        refused=None if committed is None else not committed,
        restored_step=restored if restored >= 0 else None,
        tier=rollback.text("tier") if rollback else "",
        replayed_batches=tuple(rollback.integers("replayed_batches") if rollback else []),
        skipped_batches=tuple(sorted({*skipped, *(batch for batch in skips if batch >= 0)})),
        duration_s=rollback.number("duration_s") if rollback else None,
    )


def done_about(source: Source, finding: Finding) -> list[str]:
    """Automatic actions of the run after a finding, one sentence each; empty if there were none."""
    if finding.attempt is None:
        return []
    log = EventLog.load(source, (*RESPONSE_EVENTS, *_RESTART_EVENTS))
    if finding.kind in ("hang", "rank_lost"):
        return list(_restart(log, finding.attempt))
    if finding.first_step is None:
        return []
    last = finding.first_step if finding.kind == "straggler" else finding.last_step or finding.first_step
    steps = {event.integer("from_step") for event in log.of(event_kinds.ROLLBACK, attempt=finding.attempt)}
    within = sorted(step for step in steps if finding.first_step <= step <= last + 1)
    if not within and finding.evidence.get("update_skipped") is True:
        return [respond(log, attempt=finding.attempt, step=finding.first_step, committed=False).text]
    return [f"Step {step}: {respond(log, attempt=finding.attempt, step=step).text}" for step in within[:20]]


def _restart(log: EventLog, attempt: int) -> Iterator[str]:
    """One sentence for each recorded action around the restart that followed the attempt."""
    for event in log.of(event_kinds.CULPRIT_KILLED, attempt=attempt):
        yield f"Watch killed rank {event.integer('killed_rank')}, which the others waited for."
    for event in log.of(event_kinds.EXCLUDED, attempt=attempt):
        node, device = event.integer("node_rank"), event.text("device")
        yield f"{f'Device {device} of node {node}' if device else f'Node {node}'} is excluded from then on."
    begun = log.of(event_kinds.ATTEMPT_STARTED, attempt=attempt + 1)
    if begun:
        world = begun[0].integer("world_size")
        yield f"Restarted {f'{world} ranks' if world > 0 else 'the ranks'} (attempt {attempt + 1})."
        if loaded := loaded_checkpoint(log, attempt + 1):
            yield f"Resumed from step {loaded.step}, loaded from {loaded.text('tier') or 'a checkpoint'}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{1e3 * seconds:.0f} ms"
