"""Result of replaying a refused step: whether the fault recurred, where, on which rank, with which samples.

    found = find_replay(EventLog.load(source, REPLAY_EVENTS), attempt=0, step=40)
    found.replay_verdict       # "transient", "batch", "weights" or "data_or_numerics"
    found.text((2,))      # "A replay was clean, so suspect the device of rank 2."

Each rank writes an event `replay` for the repetition on the same state, and one for the repetition on the older state
to which the run rolled back (`trainer.replay.triage`). The same computation twice gives the same result, so:

| same state, same batch | older state, same batch | replay_verdict |
|---|---|---|
| does not come back | | transient: a device, its memory, a race |
| comes back | comes back | batch |
| comes back | does not | weights of that step: numerics |
| comes back | not tried | data_or_numerics |

A fault that comes back may also come from a device that is always wrong at the same place; then other batches show it
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analyzers.run.records.event_log import Event, EventLog
from analyzers.wording import ranks_text
from probes.tape import event_kinds

__all__ = ["REPLAY_EVENTS", "Origin", "ReplayResult", "Sample", "find_replay"]

REPLAY_EVENTS = (event_kinds.REPLAY,)
_PROOF = {"operation": 0, "parameter": 0, "constant": 1, "module": 2}
"""Order of the proofs of an origin, the best first (see `trainer.replay.origin`). `module` is last, because it is also
recorded for a value that arrived from another rank in a collective.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Operation that made the first NaN or Inf, the same on `ranks`."""

    ranks: tuple[int, ...]
    module: str
    operation: str
    phase: str
    samples: tuple[int, ...]
    inputs: tuple[str, ...]
    """One line of statistics for each input of the operation."""

    @property
    def text(self) -> str:
        operation = f" ({self.operation})" if self.operation else ""
        return f"{self.module}{operation}, {self.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence of the batch. `loss` is None if not finite."""

    number: int
    data_rank: int
    loss: float | None
    place: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One refused step, replayed."""

    step: int
    came_back: bool
    came_back_on_older: bool | None
    older_step: int | None
    origin: Origin | None
    samples: tuple[Sample, ...]
    """The worst sequences of the batch, the worst first; each rank reports a few."""
    num_samples: int
    """Samples of the batch, over all data ranks."""
    changed_samples: tuple[int, ...]
    """Samples that differ from the data set when it is read again."""
    num_ranks: int

    @property
    def replay_verdict(self) -> str:
        if not self.came_back:
            return "transient"
        if self.came_back_on_older is None:
            return "data_or_numerics"
        return "batch" if self.came_back_on_older else "weights"

    def text(self, ranks: Sequence[int] = ()) -> str:
        """Describe the result in one sentence. `ranks`: the ranks that the other evidence names."""
        if not self.came_back:
            device = f"the device of {ranks_text(ranks)}" if 0 < len(ranks) <= 4 else "a device or its memory"
            return f"A replay was clean, so suspect {device}."
        where, older = self._where(), f"on the state of step {self.older_step}"
        if self.came_back_on_older is None:
            return f"A replay reproduced it{where}: data or numerics."
        if self.came_back_on_older:
            changed = ", and the batch differs from the data set" if self.changed_samples else ""
            return f"A replay reproduced it{where}, {older} too, so suspect the batch{changed}."
        return f"A replay reproduced it{where}, but not {older}, so suspect the weights of step {self.step - 1}."

    def _where(self) -> str:
        if self.origin is None:
            return ""
        ranks, samples = self.origin.ranks, self.origin.samples
        on = "all ranks" if 1 < self.num_ranks == len(ranks) else ranks_text(ranks)
        which = ""
        if 0 < len(samples) <= 8:
            which = f" with sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples))}"
        return f" in {self.origin.text} on {on}{which}"

    def evidence(self) -> dict[str, Any]:
        """The result as evidence of a finding."""
        found: dict[str, Any] = {
            "is_reproduced": self.came_back,
            "is_reproduced_when_restored": self.came_back_on_older,
            "replay_verdict": self.replay_verdict,
        }
        if self.origin is not None:
            found |= {
                "origin_module": self.origin.module,
                "origin_operation": self.origin.operation,
                "origin_phase": self.origin.phase,
                "origin_ranks": list(self.origin.ranks[:64]),
                "origin_samples": list(self.origin.samples[:64]),
                "origin_inputs": list(self.origin.inputs),
            }
        if self.changed_samples:
            found["samples_changed_on_their_way"] = list(self.changed_samples[:64])
        return found


def find_replay(log: EventLog, *, attempt: int, step: int, execution: int = 0) -> ReplayResult | None:
    """The replay that followed the `execution`-th run (from 0) of a step, or the last one if fewer are recorded; None
    if the step was not replayed."""
    by_rank: dict[int, list[list[Event]]] = {}
    for event in log.of(event_kinds.REPLAY, attempt=attempt, step=step):
        groups = by_rank.setdefault(event.rank, [])
        if event.text("state") == "same":
            groups.append([event])
        elif groups:
            groups[-1].append(event)
    chosen = {rank: groups[min(execution, len(groups) - 1)] for rank, groups in sorted(by_rank.items()) if groups}
    if not chosen:
        return None
    same = {rank: events[0] for rank, events in chosen.items()}
    older = [events[1] for events in chosen.values() if len(events) > 1]
    sizes = {event.integer("data_rank"): event.integer("num_samples") for event in same.values()}
    return ReplayResult(
        step=step,
        came_back=any(event.detail.get("came_back") is True for event in same.values()),
        came_back_on_older=any(event.detail.get("came_back") is True for event in older) if older else None,
        older_step=older[0].integer("state_step") if older else None,
        origin=_origin(same),
        samples=_samples(same.values()),
        num_samples=sum(max(0, size) for size in sizes.values()),
        changed_samples=tuple(sorted({n for event in same.values() for n in event.integers("changed_samples")})),
        num_ranks=len(same),
    )


def _origin(events: Mapping[int, Event]) -> Origin | None:
    """The origin with the best proof, forward before backward; if several places remain, the one that most ranks
    report.
    """
    reported = {rank: found for rank, event in events.items() if isinstance(found := event.detail.get("origin"), dict)}
    if not reported:
        return None

    def order(found: Mapping[str, Any]) -> tuple[int, bool]:
        return _PROOF.get(str(found.get("how")), 3), found.get("phase") != "forward"

    best = min(map(order, reported.values()))
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank, found in reported.items():
        if order(found) == best:
            place = (_text(found, "module"), _text(found, "operation"), _text(found, "phase"))
            places.setdefault(place, []).append(rank)
    place, ranks = max(places.items(), key=lambda item: len(item[1]))
    samples = {number for rank in ranks for number in _integers(reported[rank].get("samples"))}
    inputs = reported[ranks[0]].get("inputs")
    return Origin(
        ranks=tuple(ranks),
        module=place[0],
        operation=place[1],
        phase=place[2],
        samples=tuple(sorted(samples)),
        inputs=tuple(_statistics(one) for one in inputs if isinstance(one, dict)) if isinstance(inputs, list) else (),
    )


def _samples(events: Any) -> tuple[Sample, ...]:
    found: dict[int, Sample] = {}
    for event in events:
        reported = event.detail.get("samples")
        for one in reported if isinstance(reported, list) else ():
            if not isinstance(one, dict) or not isinstance(one.get("id"), int):
                continue
            loss = one.get("loss")
            place = f"{_text(one, 'file')}:{one.get('byte')}" if _text(one, "file") else ""
            sample = Sample(
                number=one["id"],
                data_rank=event.integer("data_rank"),
                loss=float(loss) if isinstance(loss, (int, float)) else None,
                place=place,
                text=_text(one, "text"),
            )
            found.setdefault(sample.number, sample)
    return tuple(sorted(found.values(), key=lambda sample: (sample.loss is not None, -(sample.loss or 0.0))))


def _statistics(described: Mapping[str, Any]) -> str:
    parts = [f"{_text(described, 'shape')} {_text(described, 'dtype')}"]
    for key in ("min", "max", "mean"):
        if isinstance(described.get(key), (int, float)):
            parts.append(f"{key} {described[key]:.4g}")
    if isinstance(described.get("nonfinite_count"), int):
        parts.append(f"non-finite {described['nonfinite_count']}")
    return " ".join(parts)


def _text(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    return value if isinstance(value, str) else ""


def _integers(value: Any) -> list[int]:
    return [item for item in value if isinstance(item, int)] if isinstance(value, list) else []
