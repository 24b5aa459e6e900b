"""State integrity: detect parameters or optimizer state that changed outside the optimizer's step.

    integrity = Integrity(training, recorder)
    integrity.after_step(step)                       # the optimizer has written the state of `step`
    vote = integrity.vote()                          # in the next step, before its small reduction
    found = integrity.judge(sums)                    # a Corruption, the same on all ranks, or None

Two comparisons are made for each state that is due:

* Replicas. The ranks of a replica group (DDP, HSDP's replicas, tensors that all tensor-parallel ranks hold whole) must
  hold the same bits. A rank's vote is its checksum times a coefficient. The coefficients of a group add up to zero, so
  all votes add up to zero if all replicas agree. This holds for any set of groups, so one number in the step's
  reduction is enough. A difference stays unnoticed with probability 2^-31.
* The chain. State held by fewer than three ranks is read after the optimizer's step and again before the next one.
  Nothing may write to the state in between. (A shard has no replica, and two replicas have no majority.)

If there is a mismatch, the ranks exchange checksums by tensor, and `analyzers.corruption.replicas.judge` names rank and
tensor.

These are not detected:

* a bit flip in a shard without a replica, if the state is not due (with `probes.chain_interval = 1` every state is
  due),
* a wrong result inside the optimizer's step,
* wrong gradients before their reduction, which reach all replicas (`trainer.guard.recompute_check` checks gradients),
* constants such as the rotary tables.

On a GPU the second reading is judged one step later, so that reading the checksums does not synchronise the device.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from analyzers.corruption.replicas import ALL_TENSORS, Corruption, Fingerprint, judge
from probes.collectives.groups.group_label import group_label
from probes.fail_open import record_error
from probes.guard.decisions import Verdict
from probes.guard.fingerprints import FingerprintReader, Reading
from probes.guard.ledger import Ledger
from probes.recorder import Recorder
from probes.tape import event_kinds
from probes.tape.format.schema import UNSET
from probes.tape.format.writer import COMPLETE
from probes.tape_recorder import TapeRecorder
from trainer.checkpoint.agreement import gather_from_all
from trainer.checkpoint.state import local_tensors, training_tensors
from trainer.layout.plan import Plan
from trainer.training.rank_training import Training

__all__ = ["Integrity", "IntegrityVote"]

PRIME = 2**31 - 1
"""Modulus of the votes, chosen so that their sum over four million ranks is exact in float64."""
ENOUGH_REPLICAS = 3
"""Minimum number of replicas for a majority that identifies the differing one."""


class IntegrityVote(NamedTuple):
    """One rank's vote on its state, or the sums over all ranks."""

    checksum: float = 0.0
    """Weighted checksum; the sum over all ranks is zero modulo `PRIME` if the replicas agree."""
    chain_broken: float = 0.0
    """Number of ranks on which the state changed between the optimizer's step and the next."""
    unreadable: float = 0.0
    """Number of ranks that could not read their state. If it is above 0, nothing is judged."""


@dataclass(slots=True)
class _Check:
    """The state of `step`, read again before the next optimizer step."""

    step: int
    taken_ns: int
    reading: Reading
    expected: Reading | None
    compares_replicas: bool


class Integrity:
    """The check on one rank; every method is called on all ranks."""

    def __init__(self, training: Training, recorder: Recorder) -> None:
        probes, checkpoint = training.config.probes, training.config.checkpoint
        self.training = training
        self.recorder = recorder
        self.enabled = probes.enabled and probes.fingerprint_interval > 0
        self.healthy_step = 0
        """Step of the newest state that was found healthy."""
        self._place = f"{socket.gethostname()} {training.device}"
        if training.device.type == "cpu":
            self._place += f" rank {training.rank}"
        # A copy is trusted only after a check, so every state that is copied is due for a check.
        self._intervals = (probes.fingerprint_interval, checkpoint.memory_interval, checkpoint.interval)
        self._chain_interval = probes.chain_interval
        self._lags = training.device.type == "cuda"
        self._reader = FingerprintReader()
        self._groups: dict[str, ReplicaGroup] = {}
        self._state_step = 0
        self._after: Reading | None = None
        self._pending: _Check | None = None
        self._checked: CheckedState | None = None
        self._reported: Corruption | None = None
        self._places: list[str] = []

    def verdict(self, found: Corruption) -> Verdict:
        """The guard's verdict on the current step, in which the corruption was found."""
        step = self.recorder.step_number
        return Verdict(
            step=step,
            kind="corruption",
            reason=f"state changed outside the optimizer, found at step {step}: {found.text}",
            healthy_step=self.healthy_step,
            ranks=found.ranks if found.certain else (),
            devices=tuple(self._places[rank] for rank in found.ranks) if found.certain else (),
        )

    def report_suspect_devices(self, verdict: Verdict, ledger: Ledger) -> None:
        """Record the devices of a corruption and how often each was suspected, so the launcher can exclude them."""
        if self.training.rank == 0:
            for rank, device in zip(verdict.ranks, verdict.devices, strict=True):
                count = ledger.corruptions.get(device, 0)
                self.recorder.event(event_kinds.DEVICE_SUSPECTED, device=device, suspect_rank=rank, count=count)

    def trusted_step(self, step: int) -> int:
        """Step of the newest state that was found healthy; `step` if integrity is not checked."""
        return self.healthy_step if self.enabled else step

    def reset(self, step: int) -> None:
        """Start over with the state of `step`, which was restored from a copy or a checkpoint. Drops earlier
        readings."""
        self._state_step, self.healthy_step = step, step
        self._after = self._pending = self._checked = self._reported = None

    def after_step(self, step: int) -> None:
        """Called when the optimizer has written the state of `step`; queues the first reading if the state is due."""
        self._state_step, self._after = step, None
        if self.enabled and self._is_chained(step):
            try:
                with self.recorder.span("fingerprint"):
                    self._after = self._read(chained_only=True)
            except Exception as error:
                record_error("fingerprints", error)

    def left_out(self, step: int) -> None:
        """Note that the optimizer skipped the update of `step`, so the state is the same as after the previous step."""
        self._state_step = step - 1

    def vote(self) -> IntegrityVote:
        """This rank's vote for the step's reduction."""
        self._checked = None
        if not self.enabled or not (self._due(self._state_step) or self._after or self._pending):
            return IntegrityVote()
        try:
            with self.recorder.span("fingerprint"):
                return self._read_vote()
        except Exception as error:
            record_error("fingerprints", error)
            return IntegrityVote(unreadable=1.0)

    def judge(self, sums: IntegrityVote) -> Corruption | None:
        """Judge the newest state by the votes of all ranks. Collective if there is a mismatch."""
        if not self.enabled or sums.unreadable or self._checked is None:
            return None
        if int(sums.checksum) % PRIME == 0 and not sums.chain_broken:
            self.healthy_step, self._reported = self._checked.step, None
            return None
        return self._explain(self._checked)

    def examine(self) -> Corruption | None:
        """Check the state now, because a bad step may be caused by a flipped bit and not by its batch. Collective."""
        if not self.enabled:
            return None
        self._pending = self._checked = None
        try:
            expected = self._after.values() if self._after is not None else {}
            self._checked = CheckedState(self._state_step, time.monotonic_ns(), self._read().values(), expected)
        except Exception as error:
            record_error("fingerprints", error)
        return self._explain(self._checked)

    def _read_vote(self) -> IntegrityVote:
        step = self._state_step
        compares = self._due(step)
        check = None
        if compares or self._after is not None:
            reading = self._read(chained_only=not compares)
            check = _Check(step, time.monotonic_ns(), reading, self._after, compares)
        if self._lags:
            check, self._pending = self._pending, check
        if check is None:
            return IntegrityVote()
        expected = check.expected.values() if check.expected is not None else {}
        self._checked = checked = CheckedState(check.step, check.taken_ns, check.reading.values(), expected)
        broken = checked.broken()
        total = 0
        if check.compares_replicas:
            weight = 1
            for name, value in checked.found.items():
                weight = weight * 48271 % PRIME  # a distinct number for each tensor, the same on all replicas
                total += self._groups[name].coefficient * weight * (value % PRIME)
            record_groups(self.recorder, checked, self._groups)
        return IntegrityVote(checksum=float(total % PRIME), chain_broken=float(bool(broken)))

    def _read(self, *, chained_only: bool = False) -> Reading:
        tensors = training_tensors(self.training)
        # State of gradient compression is written in backward, not by the optimizer's step.
        tensors = {name: value for name, value in tensors.items() if not name.startswith("compression.")}
        for name in tensors.keys() - self._groups.keys():
            self._groups[name] = self._group_of(name, tensors)
        if chained_only:
            tensors = {name: value for name, value in tensors.items() if self._has_no_majority(name)}
        return self._reader.read(local_tensors(tensors))

    def _group_of(self, name: str, tensors: dict[str, Tensor]) -> ReplicaGroup:
        """Replica group of a parameter or of its optimizer state. The state uses its parameter's group, because not
        all of it has placements (Adam's step count has none).

        Under ZeRO-1 no other rank holds the optimizer state.
        """
        kind, _, rest = name.partition(".")
        if kind == "optimizer" and self.training.plan.zero1:
            rank = self.training.rank
            return ReplicaGroup(group_label("shard", (rank,)), (rank,), 0)
        parameter = name if kind == "model" else f"model.{rest.rpartition('.')[0]}"
        return replica_group(self.training.plan, self.training.rank, tensors[parameter])

    def _has_no_majority(self, name: str) -> bool:
        return len(self._groups[name].members) < ENOUGH_REPLICAS

    def _due(self, step: int) -> bool:
        return any(interval and step % interval == 0 for interval in self._intervals)

    def _is_chained(self, step: int) -> bool:
        return self._due(step) or bool(self._chain_interval and step % self._chain_interval == 0)

    # On a mismatch.

    def _explain(self, checked: CheckedState | None) -> Corruption | None:
        """Exchange checksums by tensor; returns the culprits, or None if all agree or the difference was reported
        already."""
        own = {} if checked is None else {n: [self._groups[n].label, v] for n, v in checked.found.items()}
        broken = {} if checked is None else {name: checked.expected[name] for name in checked.broken()}
        shared = gather_from_all({"found": own, "broken": broken, "place": self._place})
        self._places = [part["place"] for part in shared]
        rows = [
            Fingerprint(rank=rank, group=group, tensor=name, hash=value, expected=part["broken"].get(name))
            for rank, part in enumerate(shared)
            for name, (group, value) in part["found"].items()
        ]
        found = judge(rows)
        if found is None or checked is None:
            return found
        record_tensors(self.recorder, checked, self._groups, found.tensors)
        if found == self._reported:
            return None
        self._reported = found
        if self.training.rank == 0:
            self.recorder.event(
                event_kinds.CORRUPTION,
                state_step=checked.step,
                finding_kind=found.kind,
                ranks=list(found.ranks),
                tensors=list(found.tensors[:64]),
                certain=found.certain,
                broken_ranks=list(found.broken_ranks),
                devices=[self._places[rank] for rank in found.ranks],
                healthy_step=self.healthy_step,
            )
        return found


@dataclass(frozen=True, slots=True)
class CheckedState:
    """Checksums of this rank's state of a step, by tensor."""

    step: int
    taken_ns: int
    found: dict[str, int]
    expected: dict[str, int]
    """Checksums after the optimizer's step, for tensors that were read then."""

    def broken(self) -> list[str]:
        return [name for name, value in self.expected.items() if self.found.get(name, value) != value]


def record_groups(recorder: Recorder, checked: CheckedState, groups: Mapping[str, ReplicaGroup]) -> None:
    """Write one row per group: the sum of its tensors' checksums, each with a distinct weight."""
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
    """Convert to a signed 64-bit number, avoiding the value that means "not recorded"."""
    value = (value + 2**63) % 2**64 - 2**63
    return value if value != UNSET["i64"] else 0


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Ranks that hold the same bits of a tensor; this rank is among them."""

    label: str
    members: tuple[int, ...]
    coefficient: int
    """Coefficient of this rank's vote; the coefficients of all members add up to zero."""


def replica_group(plan: Plan, rank: int, tensor: Tensor) -> ReplicaGroup:
    """Ranks that hold the same part as `rank` of a parameter or its optimizer state."""
    split = {"pp"}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        # A parameter is never partial, so a placement that is not replicated is sharded in some way.
        placements = zip(names, tensor.placements, strict=True)
        joined = (name for name, placement in placements if not placement.is_replicate())
        split |= {dim for name in joined for dim in name.split("+")}
    return _group_over(plan, rank, frozenset(split))


@functools.lru_cache(maxsize=64)
def _group_over(plan: Plan, rank: int, split: frozenset[str]) -> ReplicaGroup:
    """Cached, because it visits every rank, and a model has many tensors but few ways to split them."""
    at = plan.coordinates(rank)
    members = tuple(
        other
        for other in range(plan.world_size)
        if all(place == at[dim] for dim, place in plan.coordinates(other).items() if dim in split)
    )
    dims = [dim for dim, size in plan.sizes.items() if size > 1 and dim not in split]
    label = group_label("+".join(dims) or "shard", members)
    last = rank == members[-1]
    return ReplicaGroup(label, members, 0 if len(members) == 1 else 1 - len(members) if last else 1)
