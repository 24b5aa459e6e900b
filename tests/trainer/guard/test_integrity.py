"""Flipped bits in real runs: rank and tensor named within one interval, and the run ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from probes.guard.decisions import RunStopped
from probes.tape.events import read_events
from probes.tape.format.names import read_names
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.rundir import RunDir
from tests.depth import usually
from tests.processes import run_ranks
from tests.trainer.training_runs import RunResult, assert_same_bits, run_loop, small, with_steps
from trainer.faults.options import FaultError
from trainer.guard.integrity import replica_group
from trainer.layout.plan import Plan
from trainer.layout.resolve import resolve

STEPS = 12
CLEAN_STEPS = 4
TENSOR = "blocks.0.mlp.up.weight"
DDP = {"dp_replicate": 4, "dp_shard": 1}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
FSDP = {"dp_shard": 4}
FSDP_TP = {"dp_shard": 2, "tp": 2}


def corruptions(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 told, oldest first."""
    events, _, _ = read_events(RunDir(folder).rank_dir(0, 0) / "events.jsonl")
    return [event for event in events if event["kind"] == "corruption"]


def _flipped_and_clean(
    rank: int, world_size: int, folder: Path, cases: dict[str, tuple[dict[str, Any], str]]
) -> dict[str, RunResult]:
    found: dict[str, RunResult] = {}
    clean: dict[str, RunResult] = {}
    for name, (sections, fault) in cases.items():
        config = with_steps(small(**sections, model={"num_layers": 1}), STEPS)
        layout = str(sections["parallel"])
        if layout not in clean:
            clean[layout] = run_loop(config, folder / f"clean-{name}", rank=rank, world_size=world_size)
        found[name] = run_loop(config, folder / name, rank=rank, world_size=world_size, faults=[fault])
        assert found[name].skipped == [], name
        assert_same_bits(found[name], clean[layout])
    return found


# name: sections, fault; state in which it is found, kind, tensor
CASES: dict[str, tuple[dict[str, Any], str, int, str, str]] = {
    # Flipped before step 6; the states of steps 4, 8, 12 are looked at.
    "ddp": ({"parallel": DDP}, "where=parameter", 8, "replica_mismatch", f"model.{TENSOR}"),
    "ddp moment": ({"parallel": DDP}, "where=optimizer", 8, "replica_mismatch", f"optimizer.{TENSOR}.exp_avg"),
    "ddp exponent": ({"parallel": DDP}, "where=parameter,bit=30", 8, "replica_mismatch", f"model.{TENSOR}"),
    "fsdp": (
        {"parallel": FSDP, "probes": {"chain_interval": 1}},
        "where=parameter",
        5,
        "fingerprint_chain_broken",
        f"model.{TENSOR}",
    ),
    "fsdp moment": (
        {"parallel": FSDP, "probes": {"chain_interval": 1}},
        "where=optimizer",
        5,
        "fingerprint_chain_broken",
        f"optimizer.{TENSOR}.exp_avg",
    ),
    # Two replicas differ, and the chain says which is wrong.
    "hsdp": (
        {"parallel": HSDP, "probes": {"chain_interval": 1}},
        "where=parameter",
        5,
        "replica_mismatch",
        f"model.{TENSOR}",
    ),
}
CASES = usually(CASES, later=["ddp exponent", "fsdp moment"])


@pytest.mark.timeout(320)
def test_a_flipped_bit_is_named_and_undone(tmp_path: Path) -> None:
    cases = {
        name: (sections, f"bit_flip@step=6,rank=2,tensor={TENSOR},{what}")
        for name, (sections, what, *_) in CASES.items()
    }
    run_ranks(_flipped_and_clean, world_size=4, args=(tmp_path, cases), deadline_s=300)
    for name, (_, _, state, kind, tensor) in CASES.items():
        assert corruptions(tmp_path / f"clean-{name}") == []
        (told,) = corruptions(tmp_path / name)
        assert (told["finding_kind"], told["state_step"]) == (kind, state), name
        assert (told["ranks"], told["certain"]) == ([2], True), name
        # A moment spoils its own parameter with the next update, and nothing else: gradients are the same for all.
        assert told["tensors"][-1] == tensor, name
        assert set(told["tensors"]) <= {tensor, f"model.{TENSOR}"}, name


CLEAN: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": DDP},
    "ddp, bf16": {"parallel": DDP, "train": {"precision": "bf16"}},
    "ddp, fp16": {"parallel": DDP, "train": {"precision": "fp16"}},
    "hsdp, bf16": {"parallel": HSDP, "train": {"precision": "bf16"}},
    "fsdp x tp": {"parallel": FSDP_TP},
    "fsdp x tp, bf16": {"parallel": FSDP_TP, "train": {"precision": "bf16"}},
    "replicas x tp": {"parallel": {"dp_replicate": 2, "dp_shard": 1, "tp": 2}},
    "ep x tp": {"parallel": {"dp_shard": 1, "ep": 2, "tp": 2}, "model": {"num_experts": 4}},
    "experts, tp without sequence": {
        "parallel": {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "sequence_parallel": False},
        "model": {"num_experts": 4},
    },
    "experts, replicas x cp": {
        "parallel": {"dp_replicate": 2, "dp_shard": 1, "cp": 2},
        "model": {"num_experts": 4, "capacity_factor": 1.0},
    },
    "tp without sequence": {"parallel": {"dp_shard": 1, "tp": 4, "sequence_parallel": False}},
    "pipeline x ddp": {"parallel": {"pp": 2, "dp_replicate": 2, "dp_shard": 1}},
    "dropout": {"parallel": FSDP_TP, "model": {"dropout": 0.1}},
}
CLEAN = usually(
    CLEAN,
    later=[
        "ddp, bf16", "ddp, fp16", "fsdp x tp, bf16", "dropout", "replicas x tp", "tp without sequence",
        "experts, replicas x cp", "ep x tp",
    ],
)  # fmt: skip
COMPARED = {
    "ddp": {"dp_replicate:0-3"},
    "hsdp, bf16": {"dp_replicate:1,3"},
    "fsdp x tp": {"shard:3", "tp:2-3"},  # norms are whole on the tensor-parallel ranks
    "replicas x tp": {"dp_replicate:1,3", "dp_replicate+tp:0-3"},
    "ep x tp": {"shard:3", "tp:2-3"},  # norms and router
    "experts, tp without sequence": {"dp_replicate:1,3", "dp_replicate+tp:0-3"},
    "experts, replicas x cp": {"dp_replicate:1,3"},
    "tp without sequence": {"shard:3", "tp:0-3"},
    "pipeline x ddp": {"dp_replicate:2-3"},
}
"""What is compared with whom, as rank 3 has it."""


def _clean(rank: int, world_size: int, folder: Path, cases: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    every_step = {"fingerprint_interval": 1, "chain_interval": 1}
    groups: dict[str, set[str]] = {}
    for name, sections in cases.items():
        config = with_steps(small(**sections, probes=every_step), CLEAN_STEPS)
        result = run_loop(config, folder / name, rank=rank, world_size=world_size)
        assert result.skipped == [], name
        groups[name] = {row["replica_group"] for row in fingerprints(folder / name, rank)}
    return groups


def fingerprints(folder: Path, rank: int) -> list[dict[str, Any]]:
    directory = RunDir(folder).rank_dir(0, rank)
    names, _ = read_names(directory / "names.jsonl")
    rows = [row for path in segment_paths(directory, "fingerprints") for row in read_segment(path).records]
    return [{"step": int(row["step"]), "replica_group": names[int(row["replica_group"])]} for row in rows]


@pytest.mark.timeout(320)
def test_clean_runs_are_silent_in_every_layout_and_precision(tmp_path: Path) -> None:
    """Also the proof that replicas hold the same bits by right: a difference would be told."""
    groups = run_ranks(_clean, world_size=4, args=(tmp_path, CLEAN), deadline_s=300)
    for name in CLEAN:
        assert corruptions(tmp_path / name) == [], name
        told = [row["step"] for row in fingerprints(tmp_path / name, 3)]
        assert sorted(set(told)) == [*range(CLEAN_STEPS)], name
        assert groups[3][name] == COMPARED.get(name, groups[3][name]), name


def _suspected(rank: int, world_size: int, folder: Path) -> None:
    config = with_steps(small(parallel={"dp_replicate": 2, "dp_shard": 1}), STEPS)
    fault = f"bit_flip@step=6,rank=1,tensor={TENSOR}"
    met = run_loop(config, folder / "met", rank=rank, world_size=world_size, faults=[fault])
    clean = run_loop(config, folder / "clean", rank=rank, world_size=world_size)
    assert_same_bits(met, clean)
    twice = ["bit_flip@step=6,rank=1,bit=3", "bit_flip@step=9,rank=1,bit=3"]
    chained = with_steps(small(parallel={"dp_replicate": 2, "dp_shard": 1}, probes={"chain_interval": 1}), STEPS)
    with pytest.raises(RunStopped, match=r"replace .* rank 1: state was corrupted on it 2 times"):
        run_loop(chained, folder / "twice", rank=rank, world_size=world_size, faults=twice)


def test_two_replicas_without_a_chain_are_both_suspects_and_the_second_time_ends_the_run(tmp_path: Path) -> None:
    run_ranks(_suspected, world_size=2, args=(tmp_path,))
    (told,) = corruptions(tmp_path / "met")
    assert (told["ranks"], told["certain"], told["tensors"]) == ([0, 1], False, [f"model.{TENSOR}"])
    first, second = corruptions(tmp_path / "twice")
    assert (first["ranks"], first["certain"], second["ranks"]) == ([1], True, [1])
    events, _, _ = read_events(RunDir(tmp_path / "twice").rank_dir(0, 0) / "events.jsonl")
    suspected = [(event["suspect_rank"], event["count"]) for event in events if event["kind"] == "device_suspected"]
    assert suspected == [(1, 1), (1, 2)]


def test_a_single_rank_has_its_chain(tmp_path: Path) -> None:
    config = with_steps(small(probes={"chain_interval": 1}), STEPS)
    faults = [f"bit_flip@step=7,rank=0,tensor={TENSOR}.step,where=optimizer,bit=0"]
    met = run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=faults)
    clean = run_loop(config, tmp_path / "clean", rank=0, world_size=1)
    assert_same_bits(met, clean)
    (told,) = corruptions(tmp_path / "met")
    assert (told["finding_kind"], told["tensors"]) == ("fingerprint_chain_broken", [f"optimizer.{TENSOR}.step"])


def test_a_nan_of_a_flipped_bit_is_not_its_batch_s_fault(tmp_path: Path) -> None:
    """The highest bit of the exponent: the loss is not finite in that very step, which is not one of the checks."""
    config = with_steps(small(probes={"chain_interval": 1}, checkpoint={"interval": 0}), STEPS)
    faults = ["bit_flip@step=7,rank=0,tensor=norm.weight,bit=30", "failing_batch@batch=10"]
    met = run_loop(config, tmp_path, rank=0, world_size=1, faults=faults)
    assert met.skipped == [10], "only the batch of the NaN that was no flip"


def test_without_a_state_to_go_back_to_the_run_stops(tmp_path: Path) -> None:
    config = with_steps(small(probes={"chain_interval": 1}, checkpoint={"interval": 0, "memory_interval": 0}), STEPS)
    with pytest.raises(RunStopped, match="no copy from before the corruption is left"):
        run_loop(config, tmp_path, rank=0, world_size=1, faults=["bit_flip@step=7,rank=0"])


def test_with_recovery_off_it_is_told_and_training_goes_on(tmp_path: Path) -> None:
    config = with_steps(small(probes={"chain_interval": 1}, recovery={"enabled": False}), STEPS)
    met = run_loop(config, tmp_path, rank=0, world_size=1, faults=["bit_flip@step=7,rank=0"])
    assert met.outcome == "finished"
    assert len(corruptions(tmp_path)) == 1


def test_replica_groups_of_many_tensors_visit_the_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks times a thousand tensors would take most of a minute in the first step."""
    visited: list[int] = []
    coordinates = Plan.coordinates

    def counted(plan: Plan, rank: int) -> dict[str, int]:
        visited.append(rank)
        return coordinates(plan, rank)

    monkeypatch.setattr(Plan, "coordinates", counted)
    plan = resolve(small(train={"global_batch_size": 64}, parallel={"dp_replicate": 64, "dp_shard": 1}), 64)
    groups = {replica_group(plan, 5, torch.zeros(number)) for number in range(100)}
    assert [group.members for group in groups] == [tuple(range(64))]
    assert len(visited) <= 65


def test_switched_off_nothing_is_read(tmp_path: Path) -> None:
    config = with_steps(small(probes={"fingerprint_interval": 0}), 8)
    run_loop(config, tmp_path, rank=0, world_size=1)
    assert segment_paths(RunDir(tmp_path).rank_dir(0, 0), "fingerprints") == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("bit_flip@step=2,rank=0,tensor=nothing", "'nothing': not a parameter"),
        ("bit_flip@step=2,rank=0,tensor=head.weight.exp,where=gradient", "not a parameter"),
        ("bit_flip@step=2,rank=0,bit=32", "from 0 to 31"),
        ("bit_flip@step=2,rank=0,where=cache", "must be parameter, optimizer, gradient"),
    ],
)
def test_flips_that_cannot_be_made(fault: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FaultError, match=words):
        run_loop(with_steps(small(), 3), tmp_path, rank=0, world_size=1, faults=[fault])
