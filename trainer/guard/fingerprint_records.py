"""Records of state checksums: one row for each replica group, and one for each tensor that differs.

checked = CheckedState(step=40, taken_ns=..., found={"model.norm.weight": 17}, expected={})
checked.broken()                                  # tensors whose checksum is not the expected one
record_groups(recorder, checked, groups)
record_tensors(recorder, checked, groups, ["model.norm.weight"])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from analyzers.corruption.replicas import ALL_TENSORS
from probes.recorder import Recorder
from probes.tape.schema import UNSET
from probes.tape.writer import COMPLETE
from probes.tape_recorder import TapeRecorder
from trainer.guard.replica_groups import ReplicaGroup

__all__ = ["CheckedState", "record_groups", "record_tensors"]


@dataclass(frozen=True, slots=True)
class CheckedState:
    """Checksums of this rank's state of a step, by tensor."""

    step: int
    taken_ns: int
    found: dict[str, int]
    expected: dict[str, int]
    """Checksums after the optimizer's step, of the tensors that were read then."""

    def broken(self) -> list[str]:
        return [name for name, value in self.expected.items() if self.found.get(name, value) != value]


def record_groups(recorder: Recorder, checked: CheckedState, groups: Mapping[str, ReplicaGroup]) -> None:
    """Write one row a group: the sum of its tensors' checksums, each with a distinct weight."""
    sums: dict[str, list[int]] = {}
    for number, (name, value) in enumerate(checked.found.items()):
        row = sums.setdefault(groups[name].label, [0, 0, 0])
        weight = 2 * number + 1
        row[0] += weight * value
        if name in checked.expected:
            row[1] += weight * checked.expected[name]
            row[2] += 1
    for label, (value, expected, count) in sums.items():
        chained = count == sum(groups[name].label == label for name in checked.found)
        _append(recorder, checked, label, ALL_TENSORS, value, expected if chained else None)


def record_tensors(
    recorder: Recorder, checked: CheckedState, groups: Mapping[str, ReplicaGroup], names: Iterable[str]
) -> None:
    """Write one row for each of these tensors that this rank holds."""
    for name in names:
        if name in checked.found:
            label, expected = groups[name].label, checked.expected.get(name)
            _append(recorder, checked, label, name, checked.found[name], expected)


def _append(recorder: Recorder, checked: CheckedState, label: str, name: str, value: int, expected: int | None) -> None:
    if isinstance(recorder, TapeRecorder):
        texts = recorder.name(label), recorder.name(name)
        before = int(UNSET["i64"]) if expected is None else _signed(expected)
        tape = recorder.tape("fingerprints")
        tape.append(COMPLETE, checked.step, checked.taken_ns, *texts, _signed(value), before)


def _signed(value: int) -> int:
    """Modulo 2^64, as a signed number; never the one that stands for "not recorded"."""
    value = (value + 2**63) % 2**64 - 2**63
    return value if value != UNSET["i64"] else 0
