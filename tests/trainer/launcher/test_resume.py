"""Exact resume: a run that was stopped, or that lost a checkpoint, ends with the bits of one that was not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.depth import later, tried, usually
from tests.processes import run_ranks
from tests.trainer.training_runs import RunResult, assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.manifest import CheckpointError
from trainer.config.config import Config
from trainer.config.load import changed_config
from trainer.guard.recovery import Recovery
from trainer.launcher.resume import Resumed
from trainer.launcher.start import _usual_size

STEPS = 20
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "ddp, zero-1": (2, {"dp_replicate": 2, "dp_shard": 1, "zero1": True}),
    # What PowerSGD could not send is part of the state.
    "ddp, powersgd": (
        2,
        {
            "dp_replicate": 2,
            "dp_shard": 1,
            "gradient_compression": "powersgd",
            "powersgd_rank": 2,
            "powersgd_start": 3,
            "ddp_bucket_mb": 0.02,
        },
    ),
    # DDP forms other buckets in the first step of a process.
    "ddp, int8": (
        2,
        {"dp_replicate": 2, "dp_shard": 1, "gradient_compression": "int8", "ddp_bucket_mb": 0.02},
    ),
    "fsdp": (2, {"dp_shard": 2}),
    "fsdp x tp": (4, {"dp_shard": 2, "tp": 2}),
    "ep x tp": (4, {"dp_shard": 1, "ep": 2, "tp": 2}),
    "ep x cp": (4, {"dp_shard": 1, "ep": 2, "cp": 2}),
}
LAYOUTS = usually(LAYOUTS, later=["ddp", "ep x cp", "fsdp x tp"])


def _config(**sections: Any) -> Config:
    return with_steps(small(**sections), STEPS)


_STOP = tried(7, nightly=11)
_PAST_STOP = tried(10, nightly=STEPS)
"""Last step of a run that was stopped at `_STOP`: those of many layouts take a tenth of a second each."""


def _stop_and_resume(rank: int, world_size: int, folder: Path, layouts: dict[str, dict[str, Any]]) -> bool:
    for name, parallel in layouts.items():
        model = {"num_layers": 1, "dropout": 0.1, "num_experts": 4 if "ep" in parallel else 0}
        config = with_steps(small(parallel=parallel, model=model), _PAST_STOP)
        cut = folder / name / "cut"
        # The step at which rank 0 is asked to stop is no multiple of any interval; a batch was skipped before it.
        faults = ["failing_batch@batch=5"]
        first = run_loop(config, cut, rank=rank, world_size=world_size, stop_at_step=_STOP, faults=faults)
        assert (first.outcome, max(first.losses)) == ("stopped", _STOP)
        second = run_loop(config, cut, rank=rank, world_size=world_size, attempt=1, faults=faults)
        assert second.outcome == "finished"
        assert min(second.losses) == _STOP + 1, "resumed where it stopped"
        assert second.skipped == [5]
        without = run_loop(config, folder / name / "without", rank=rank, world_size=world_size, missing=[5])
        assert_same_bits(second, without, steps=range(_STOP + 1, _PAST_STOP + 1))
    return True


@pytest.mark.timeout(320)  # half a minute on an idle machine
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(world_size: int, tmp_path: Path) -> None:
    layouts = {name: parallel for name, (size, parallel) in LAYOUTS.items() if size == world_size}
    assert all(run_ranks(_stop_and_resume, world_size=world_size, args=(tmp_path, layouts), deadline_s=300))


@pytest.mark.parametrize(
    ("overrides", "num_ranks"),
    [
        ([], 4),
        (["parallel.prefetch_blocks=1", "train.steps=9"], 4),
        (["parallel.gradient_compression = none"], 4),
        (["parallel.tp=2", "parallel.dp_shard=1"], 2),
    ],
)
def test_a_resume_has_as_many_ranks_as_before_unless_the_mesh_changes(
    overrides: list[str], num_ranks: int, tmp_path: Path
) -> None:
    config = changed_config(Config().model_dump(mode="json"), overrides)
    resumed = Resumed(run=RunDir(tmp_path), config=config, world_size=4)
    assert _usual_size(config, resumed, overrides) == num_ranks


def _reshard(rank: int, world_size: int, folder: Path, parallel: dict[str, Any], steps: int) -> RunResult:
    return run_loop(
        with_steps(small(parallel=parallel), steps), folder, rank=rank, world_size=world_size, attempt=steps
    )


@later("the same meshes to the last bit, optimizer state included: checkpoint/disk_tier/test_reshard.py")
def test_a_checkpoint_loads_on_another_mesh(tmp_path: Path) -> None:
    """fsdp 4 -> fsdp 2 x tp 2 -> one process, a few steps on each; the parameters are those that were saved."""
    run_ranks(_reshard, world_size=4, args=(tmp_path, {"dp_shard": 4}, 4))
    run_ranks(_reshard, world_size=4, args=(tmp_path, {"dp_shard": 2, "tp": 2}, 6))
    (last,) = [_reshard(0, 1, tmp_path, {"dp_shard": 1}, 8)]
    assert min(last.losses) == 7
    alone = run_loop(with_steps(small(), 8), tmp_path / "alone", rank=0, world_size=1)
    for name, value in alone.tensors.items():
        torch.testing.assert_close(last.tensors[name], value, rtol=0, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def _events(folder: Path, attempt: int) -> list[dict[str, Any]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, 0) / "events.jsonl")
    return events


def _recovery_of(folder: Path, config: Config) -> Recovery:
    """What a run of one rank ended with."""
    found: list[Recovery] = []
    run_loop(config, folder, rank=0, world_size=1, change=lambda session: found.append(session.recovery))
    return found[0]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 0x10
    path.write_bytes(blob)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 8 and 16."""
    folder = tmp_path_factory.mktemp("cut")
    run_loop(with_steps(small(), 16), folder, rank=0, world_size=1)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_loop(_config(), tmp_path_factory.mktemp("whole"), rank=0, world_size=1)


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty, Path.unlink], ids=["truncated", "bit", "empty", "gone"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    damage: Any, name: str, cut: Path, whole: RunResult, tmp_path: Path
) -> None:
    shutil.copytree(cut, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoints" / "step-00000016" / name)
    again = run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 9, "from step 8"
    assert_same_bits(again, whole, steps=range(9, STEPS + 1))
    states = [(e["step"], e["state"], e.get("reason", "")) for e in _events(tmp_path, 1) if e.get("tier") == "disk"]
    assert states[0][:2] == (16, "condemned")
    assert "step-00000016" in states[0][2]
    assert (8, "loaded") in [state[:2] for state in states]


def test_nothing_is_unpickled_before_its_hash_agrees(tmp_path: Path) -> None:
    """A `.metadata` that would run code is refused; the marker file that it would make is not there."""
    import pickle

    run_loop(with_steps(small(), 8), tmp_path, rank=0, world_size=1)
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    (tmp_path / "checkpoints" / "step-00000008" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="none of 1 checkpoints can be used"):
        run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1)
    assert not marker.exists()


def test_starting_over_is_possible_when_asked_for(tmp_path: Path) -> None:
    run_loop(with_steps(small(), 8), tmp_path, rank=0, world_size=1)
    again = run_loop(_config(checkpoint={"resume": False}), tmp_path, rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 1


def test_the_newest_good_checkpoints_are_kept(tmp_path: Path) -> None:
    config = with_steps(small(checkpoint={"interval": 2, "keep": 2, "keep_every": 4, "asynchronous": False}), 16)
    run_loop(config, tmp_path, rank=0, world_size=1)
    # 12 is the newest that three healthy steps followed, 12 and 10 are the newest good ones; 4 and 8 are for ever.
    assert checkpoint_steps(tmp_path / "checkpoints") == [4, 8, 10, 12, 14, 16]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    states = [(e["step"], e["state"]) for e in _events(tmp_path, 0) if e["kind"] == "checkpoint" and e["step"] == 6]
    assert states == [(6, "writing"), (6, "complete"), (6, "verified"), (6, "good"), (6, "removed")]


def test_the_only_good_checkpoint_is_kept(tmp_path: Path) -> None:
    """However many are newer and still have to prove themselves."""
    recovery = _recovery_of(
        tmp_path, with_steps(small(checkpoint={"interval": 1, "keep": 1, "asynchronous": False}), 6)
    )
    assert checkpoint_steps(tmp_path / "checkpoints") == [3, 4, 5, 6]
    recovery.copies.disk.prune(3)
    recovery.copies.disk.prune(None)
    assert recovery.copies.disk.saved == [3, 4, 5, 6]


def test_a_lost_ledger_is_made_good_from_the_checkpoint(tmp_path: Path) -> None:
    faults = ["failing_batch@batch=5"]
    run_loop(with_steps(small(), 8), tmp_path, rank=0, world_size=1, faults=faults)
    (tmp_path / "checkpoints" / "ledger.json").write_text("{")
    again = run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1)
    assert again.skipped == [5]
    assert any("damaged" in event.get("reason", "") for event in _events(tmp_path, 1))
