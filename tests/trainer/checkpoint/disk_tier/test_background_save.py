"""Saves in the background: training goes on, all ranks agree on what there is, and trouble with a disk ends nothing."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.fakes import ProcessEnd
from tests.forked import run_python
from tests.processes import run_ranks
from tests.trainer.training_runs import assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.disk_tier import saving
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError
from trainer.checkpoint.state import Position
from trainer.rank.loop import Session

ROOT = Path(__file__).parents[4]


def _states(folder: Path, step: int | None = None, attempt: int = 0) -> list[tuple[int, str]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, 0) / "events.jsonl")
    told = [e for e in events if e["kind"] == "checkpoint" and e["tier"] == "disk"]
    return [(e["step"], e["state"]) for e in told if step in (None, e["step"])]


class SlowDisk:
    """A disk whose syncs in the background take until `release`; those of the training thread are not touched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.waiting = threading.Event()
        sync = os.fsync

        def slow(fd: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.waiting.set()
                assert self.release.wait(60)
            sync(fd)

        monkeypatch.setattr(os, "fsync", slow)


def _after_step(session: Session, step: int, action: Any) -> None:
    """Do something once a step was taken."""
    taken = session.recovery.taken

    def taking(position: Position, batch_index: int) -> Position:
        after = taken(position, batch_index)
        if position.step + 1 == step:
            action()
        return after

    session.recovery.taken = taking  # type: ignore[method-assign]


def test_training_goes_on_while_a_slow_disk_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of step 4 hangs until step 18: later ones wait, none is lost for good, and the bits are the same."""
    disk = SlowDisk(monkeypatch)
    config = with_steps(small(checkpoint={"interval": 4}), 24)

    def free_the_disk(session: Session) -> None:
        """From step 18 on the disk is as fast as the training: each step waits for what is done in the background."""
        _after_step(session, 18, disk.release.set)
        for step in range(18, 24):
            _after_step(session, step, lambda: session.recovery.copies.disk.background.submit(bool).result())

    slow = run_loop(config, tmp_path / "slow", rank=0, world_size=1, change=free_the_disk)
    assert disk.waiting.is_set()
    states = _states(tmp_path / "slow")
    assert states[:4] == [(4, "writing"), (8, "delayed"), (12, "delayed"), (16, "delayed")]
    saved = [step for step, state in states if state == "verified"]
    assert saved[0] == 4
    assert 18 < saved[1] < 24, "the delayed one was made up for as soon as the disk was free"
    assert saved[-1] == 24
    assert saved == checkpoint_steps(tmp_path / "slow" / "checkpoints")
    plain = run_loop(config, tmp_path / "plain", rank=0, world_size=1)
    assert_same_bits(slow, plain)


def test_a_save_condemned_on_its_way_never_becomes_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 8 is being written when step 10 turns out bad and the training goes back to step 4."""
    disk = SlowDisk(monkeypatch)

    def release_after_the_rollback(session: Session) -> None:
        refuse = session.recovery.refuse

        def refusing(*arguments: Any) -> Position:
            after = refuse(*arguments)
            assert after.step == 4
            disk.release.set()
            session.recovery.copies.disk.background.submit(bool).result()  # what was being written is over
            return after

        session.recovery.refuse = refusing  # type: ignore[method-assign]

    config = with_steps(small(), 20)
    faults = ["failing_batch@batch=9"]
    met = run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=faults, change=release_after_the_rollback)
    states = [state for _, state in _states(tmp_path / "met", step=8)]
    assert states[:3] in (["writing", "condemned"], ["writing", "condemned", "writing"]), "the replay saves it again"
    assert not list((tmp_path / "met" / "checkpoints").glob("*.tmp"))
    never = run_loop(config, tmp_path / "never", rank=0, world_size=1, missing=[9])
    assert_same_bits(met, never)


def test_a_rollback_to_disk_waits_for_the_save_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(monkeypatch)
    threading.Timer(1.0, disk.release.set).start()
    config = with_steps(small(checkpoint={"memory_interval": 0}), 16)
    met = run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=["failing_batch@batch=10"])
    events, _, _ = read_events(RunDir(tmp_path / "met").rank_dir(0, 0) / "events.jsonl")
    (rollback,) = (event for event in events if event["kind"] == "rollback")
    assert (rollback["tier"], rollback["to_step"]) == ("disk", 8)
    never = run_loop(config, tmp_path / "never", rank=0, world_size=1, missing=[10])
    assert_same_bits(met, never)


def test_a_buffer_that_is_being_written_is_not_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk holds the state of the step that it says, however many copies were taken meanwhile."""
    disk = SlowDisk(monkeypatch)
    config = with_steps(small(checkpoint={"interval": 4, "memory_interval": 1, "keep": 9}), 20)
    run_loop(config, tmp_path / "slow", rank=0, world_size=1, change=lambda s: _after_step(s, 18, disk.release.set))
    for newer in checkpoint_steps(tmp_path / "slow" / "checkpoints")[1:]:
        (tmp_path / "slow" / "checkpoints" / f"step-{newer:08d}").rename(tmp_path / f"{newer}")
    again = run_loop(config, tmp_path / "slow", rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 5
    plain = run_loop(config, tmp_path / "plain", rank=0, world_size=1)
    assert_same_bits(again, plain, steps=range(5, 21))


def _one_rank_cannot_write(rank: int, world_size: int, folder: Path) -> tuple[list[int], int]:
    """Until step 10 a file lies where rank 1's shard should go."""
    config = with_steps(small(parallel={"dp_shard": 2}, checkpoint={"interval": 4}), 16)
    found: list[Any] = []

    def change(session: Session) -> None:
        found.append(session.recovery)
        if rank == 1:
            lend = session.recovery.copies.memory.lend

            def blocked(values: Any) -> Any:
                if values.position.step < 10:
                    number = found[0].copies.disk._num_saves + 1
                    scratch = folder / "checkpoints" / f"step-{values.position.step:08d}.{number}"
                    (path := scratch.with_name(f"{scratch.name}.a0.tmp")).mkdir(parents=True, exist_ok=True)
                    (path / "__1_0.distcp").write_text("in the way")
                return lend(values)

            session.recovery.copies.memory.lend = blocked  # type: ignore[method-assign]

    run_loop(config, folder, rank=rank, world_size=world_size, change=change)
    return found[0].copies.disk.saved, found[0].ledger.good_step


def test_a_shard_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    one, other = run_ranks(_one_rank_cannot_write, world_size=2, args=(tmp_path,), deadline_s=60)
    assert one == other
    assert min(one[0]) >= 12
    assert checkpoint_steps(tmp_path / "checkpoints") == one[0]
    events, _, _ = read_events(RunDir(tmp_path).rank_dir(0, 0) / "events.jsonl")
    (first, *_) = (event for event in events if event.get("state") == "failed")
    assert first["step"] == 4
    assert first["reason"].startswith("rank 1: FileExistsError")


class BadReads:
    """Reading back the files of these steps fails, each time; `times` says how often it was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int, error: Exception) -> None:
        self.times = 0
        verify = saving.verify_files

        def fails(folder: Path, *arguments: Any, **options: Any) -> None:
            if int(folder.name.removeprefix("step-")) in steps:
                self.times += 1
                raise error
            verify(folder, *arguments, **options)

        monkeypatch.setattr(saving, "verify_files", fails)


UNREAD = StorageError("__0_0.distcp cannot be read now (Input/output error)")


def test_what_cannot_be_read_back_now_stays_and_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last state is written once more, and its folder is there although that cannot be read back either."""
    config = with_steps(small(checkpoint={"interval": 4, "asynchronous": False}), 8)
    reads = BadReads(monkeypatch, 4, 8, error=UNREAD)
    with pytest.raises(StorageError, match="the last state, of step 8, cannot be saved"):
        run_loop(config, tmp_path, rank=0, world_size=1)
    assert reads.times == 3
    assert checkpoint_steps(tmp_path / "checkpoints") == [4, 8]
    once = ["writing", "complete", "failed"]
    assert [state for _, state in _states(tmp_path)] == once * 3
    events, _, _ = read_events(RunDir(tmp_path).rank_dir(0, 0) / "events.jsonl")
    (told, *_) = (event["reason"] for event in events if event.get("state") == "failed")
    assert told.startswith("step-00000004 is kept, and verified when it is loaded: rank 0: StorageError")
    monkeypatch.undo()
    again = run_loop(with_steps(config, 9), tmp_path, rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 9


def test_what_could_not_be_read_back_is_condemned_and_pruned_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_steps(small(checkpoint={"interval": 4, "asynchronous": False, "keep": 1}), 24)
    BadReads(monkeypatch, 4, 16, error=UNREAD)
    run_loop(config, tmp_path, rank=0, world_size=1, faults=["nan_grad@step=17,rank=0"])
    once = ["writing", "complete", "failed"]
    assert [state for _, state in _states(tmp_path, step=4)] == [*once, "removed"]
    assert [state for _, state in _states(tmp_path, step=16)] == [*once, "condemned", *once, "removed"]
    assert 4 not in checkpoint_steps(tmp_path / "checkpoints")


def test_what_is_read_back_and_differs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_steps(small(checkpoint={"interval": 4, "asynchronous": False}), 8)
    BadReads(monkeypatch, 4, error=CheckpointError("__0_0.distcp has 7 bytes, not 9"))
    run_loop(config, tmp_path, rank=0, world_size=1)
    assert checkpoint_steps(tmp_path / "checkpoints") == [8]
    assert [state for _, state in _states(tmp_path, step=4)] == ["writing", "complete", "failed"]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_crash_while_a_checkpoint_is_replaced_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Step 8 could not be read back and is written once more: the older one makes room, the newer one takes its place,
    the older one is removed. The process ends before each of these."""
    config = with_steps(small(checkpoint={"interval": 4, "asynchronous": False}), 8)
    reads = BadReads(monkeypatch, 8, error=UNREAD)
    rename, renamed = Path.rename, []

    def rename_until(path: Path, target: Path) -> Path:
        if reads.times and path.name.startswith("step-00000008"):
            renamed.append(path)
            if len(renamed) == number:
                raise ProcessEnd
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_until)
    with pytest.raises(ProcessEnd):
        run_loop(config, tmp_path, rank=0, world_size=1)
    monkeypatch.undo()
    again = run_loop(with_steps(config, 9), tmp_path, rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 9
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {
        f"step-{step:08d}" for step in (4, 8, 9)
    }


@pytest.mark.parametrize("refused", ["its name", "its content"])
def test_a_checkpoint_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    config = with_steps(small(checkpoint={"interval": 4, "asynchronous": False}), 8)
    folder = tmp_path / "checkpoints" / "step-00000008"
    rename = Path.rename
    first: dict[str, bytes] = {}

    def fail(checkpoint: Path, *arguments: Any, **options: Any) -> None:
        if checkpoint == folder and not first:
            first.update({path.name: path.read_bytes() for path in folder.iterdir()})
            raise UNREAD
        if checkpoint == folder and refused == "its content":
            raise CheckpointError("__0_0.distcp has 7 bytes, not 9")

    def refuse(path: Path, target: Path) -> Path:
        if first and refused == "its name" and target == folder and path.name.endswith(".tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(saving, "verify_files", fail)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError, match="the last state, of step 8, cannot be saved"):
        run_loop(config, tmp_path, rank=0, world_size=1)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    assert checkpoint_steps(tmp_path / "checkpoints") == [4, 8]
    again = run_loop(with_steps(config, 9), tmp_path, rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 9


def _one_rank_cannot_read_back(rank: int, world_size: int, folder: Path) -> tuple[list[int], set[int]]:
    """Step 4: rank 1 cannot read its file. Step 8: rank 0 cannot either, and rank 1 reads what it did not write."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        BadReads(patch, *((8,) if rank == 0 else (4,)), error=UNREAD)
        if rank == 1:
            BadReads(patch, 8, error=CheckpointError("__1_0.distcp has 7 bytes, not 9"))
        config = with_steps(small(parallel={"dp_shard": 2}, checkpoint={"interval": 4, "asynchronous": False}), 12)
        run_loop(config, folder, rank=rank, world_size=world_size, change=lambda s: found.append(s.recovery))
    disk = found[0].copies.disk
    return disk.saved, disk.unread


def test_ranks_agree_on_what_was_not_read_back(tmp_path: Path) -> None:
    ranks = run_ranks(_one_rank_cannot_read_back, world_size=2, args=(tmp_path,), deadline_s=60)
    assert ranks == [([12], {4})] * 2
    assert checkpoint_steps(tmp_path / "checkpoints") == [4, 12]


@functools.cache
def _can_mount() -> bool:
    try:
        probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(probe, capture_output=True, timeout=100).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.parametrize(
    ("kind", "reason"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_a_disk_that_refuses_does_not_end_the_training(kind: str, reason: str, tmp_path: Path) -> None:
    """A real file system that refuses until step 10; the save after that is good, and is loaded."""
    if not _can_mount():
        pytest.skip("needs a user namespace in which tmpfs can be mounted")
    done = run_python(["-m", "tests.trainer.hostile_disk", kind, str(tmp_path / "run")], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first_step, names = done.stdout.strip().splitlines()[-1].split(" ", 1)
    assert int(first_step) == 21, "resumed from the end of the first run"
    assert "tmp" not in names
    events, _, _ = read_events(RunDir(tmp_path / "run").rank_dir(0, 0) / "events.jsonl")
    failed = [event for event in events if event.get("state") == "failed" and "step-" in event["path"]]
    assert [event["step"] for event in failed] == [4, 8]
    assert all(reason in event["reason"] for event in failed)
    assert [step for step, state in _states(tmp_path / "run") if state == "verified"] == [12, 16, 20]
