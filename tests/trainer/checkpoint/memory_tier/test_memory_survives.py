"""Copies in shared memory: a restart goes on from them, if they are whole, vetted and on every rank."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from probes.guard.ledger import LEDGER_NAME, Ledger
from probes.tape.events import read_events
from probes.tape.files.shared_memory import SHARED_MEMORY, remove_shared, shared_folder, sweep_stale
from probes.tape.rundir import RunDir
from tests.fakes import ProcessEnd
from tests.processes import run_ranks, start_function
from tests.trainer.training_runs import assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.memory_tier.slots import Slot
from trainer.checkpoint.state import Position
from trainer.config.config import Config
from trainer.guard.ledger_file import save_ledger
from trainer.rank.loop import Session

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
STEPS = 24


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Any:
    yield
    for folder in (tmp_path, *(path for path in tmp_path.iterdir() if path.is_dir())):
        remove_shared(folder)


def _config(**sections: Any) -> Config:
    """Copies at every 4th step, on disk only at step 8."""
    sections["checkpoint"] = {"interval": 8, "asynchronous": False, **sections.get("checkpoint", {})}
    return with_steps(small(**sections), STEPS)


def _dies_after(step: int, *, by_signal: bool = False) -> Any:
    def change(session: Session) -> None:
        taken = session.recovery.taken

        def taking(position: Position, batch_index: int) -> Position:
            after = taken(position, batch_index)
            if position.step + 1 == step:
                memory = session.recovery.copies.memory
                for copy in (*memory._copies, *memory._spare):  # a later one of this process would find its note
                    if copy.sealing is not None:
                        copy.sealing.result(100)
                session.recovery.copies.disk.background.shutdown()  # so would a ledger that is written meanwhile
                if by_signal:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ProcessEnd
            return after

        session.recovery.taken = taking  # type: ignore[method-assign]

    return change


def _each_is_hashed(session: Session) -> None:
    """Wait after each step until its copy is hashed: a busy machine is behind with it, and holds more copies then."""
    taken = session.recovery.taken

    def taking(position: Position, batch_index: int) -> Position:
        after = taken(position, batch_index)
        for copy in session.recovery.copies.memory._copies:
            if copy.sealing is not None:
                copy.sealing.result(30)
        return after

    session.recovery.taken = taking  # type: ignore[method-assign]


def _die(config: Config, folder: Path, step: int, **more: Any) -> None:
    with pytest.raises(ProcessEnd):
        run_loop(config, folder, rank=0, world_size=1, change=_dies_after(step), **more)


def _killed(folder: Path) -> None:
    torch.set_num_threads(1)
    run_loop(_config(), folder, rank=0, world_size=1, change=_dies_after(15, by_signal=True))


def _loaded(folder: Path, attempt: int = 1) -> list[tuple[str, int]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, 0) / "events.jsonl")
    return [(event["tier"], event["step"]) for event in events if event.get("state") == "loaded"]


def test_after_sigkill_the_newest_vetted_copy_is_gone_on_from(tmp_path: Path) -> None:
    """Killed after step 15: the copy of step 12 has just been vetted, the disk has step 8."""
    assert start_function(_killed, tmp_path / "killed").wait(60) == -signal.SIGKILL
    again = run_loop(_config(), tmp_path / "killed", rank=0, world_size=1, attempt=1)
    assert _loaded(tmp_path / "killed") == [("memory", 12)]
    assert min(again.losses) == 13
    whole = run_loop(_config(), tmp_path / "whole", rank=0, world_size=1)
    assert_same_bits(again, whole, steps=range(13, STEPS + 1))
    assert not shared_folder(tmp_path / "killed").exists(), "the end of a run gives the memory back"


def test_a_restart_long_after_the_last_copy_goes_on_from_it(tmp_path: Path) -> None:
    """Copies may be rarer than `STALE_S`, and a hang may last longer until its culprit is killed."""
    _die(_config(), tmp_path, 15)
    folder = shared_folder(tmp_path) / "rank-00000"
    (folder / "pid").write_text(str(2**22 - 1))
    for path in (folder.parent, folder):
        os.utime(path, (0, 0))
    run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1)
    assert _loaded(tmp_path) == [("memory", 12)]


def test_hashing_that_is_far_behind_bounds_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that hashes gets no time until the training waits for it."""
    real, held, most = Slot.seal, threading.Event(), [0]

    def starved(slot: Slot, *args: Any) -> None:
        held.wait(60)
        real(slot, *args)

    def change(session: Session) -> None:
        copies = session.recovery.copies.memory
        taken = session.recovery.taken

        def taking(position: Position, batch_index: int) -> Position:
            most[0] = max(most[0], len(copies._copies) + len(copies._spare))
            if len(copies._spare) >= copies._limit:
                threading.Timer(0.2, held.set).start()
            return taken(position, batch_index)

        session.recovery.taken = taking  # type: ignore[method-assign]
        limits.append(copies._limit)

    limits: list[int] = []
    monkeypatch.setattr(Slot, "seal", starved)
    config = _config(checkpoint={"memory_interval": 1})
    run_loop(config, tmp_path / "run", rank=0, world_size=1, change=change)
    assert held.is_set(), "the hashing fell behind"
    assert most[0] <= 2 * limits[0] + 2


def _both_die(rank: int, world_size: int, folder: Path, vetted_on: int, damaged_on: int) -> int:
    config = _config(parallel={"dp_shard": 2})
    with pytest.raises(ProcessEnd):
        run_loop(config, folder, rank=rank, world_size=world_size, change=_dies_after(15))
    rank_folder = shared_folder(folder) / f"rank-{rank:05d}"
    for slot in Slot.all_in(rank_folder):
        if rank != vetted_on:
            slot.vetted_path.unlink(missing_ok=True)  # killed just before it came to that
        if rank == damaged_on:
            blob = bytearray(slot.path.read_bytes())
            blob[len(blob) // 3] ^= 4
            slot.path.write_bytes(blob)
    again = run_loop(config, folder, rank=rank, world_size=world_size, attempt=1)
    return min(again.losses)


@pytest.mark.parametrize(("damaged_on", "first_step"), [(-1, 13), (1, 9)], ids=["whole", "a bit flipped on rank 1"])
def test_all_ranks_take_the_same_state(damaged_on: int, first_step: int, tmp_path: Path) -> None:
    """Vetted on one rank is vetted; damaged on one rank is damaged, and the disk is used."""
    found = run_ranks(_both_die, world_size=2, args=(tmp_path, 0, damaged_on))
    assert found == [first_step, first_step]


def test_an_unvetted_copy_is_not_used(tmp_path: Path) -> None:
    _die(_config(), tmp_path, 14)  # that of step 12 has two healthy steps, that of step 8 has enough
    again = run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1)
    assert (_loaded(tmp_path), min(again.losses)) == ([("memory", 8)], 9)


def test_a_newer_checkpoint_on_disk_is_preferred(tmp_path: Path) -> None:
    config = _config()
    _die(config, tmp_path, 17)
    run_loop(config, tmp_path, rank=0, world_size=1, attempt=1)
    assert _loaded(tmp_path) == [("disk", 16)]


def test_a_copy_with_a_batch_that_was_given_up_since_is_not_used(tmp_path: Path) -> None:
    """Killed between the decision and the way back."""
    _die(_config(), tmp_path, 15)
    ledger, _ = Ledger.load(tmp_path / "checkpoints" / LEDGER_NAME)
    ledger.skip(10, "said by the test")
    save_ledger(ledger)
    again = run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1)
    assert [step for _, step in _loaded(tmp_path)] == [8]
    never = run_loop(_config(), tmp_path / "never", rank=0, world_size=1, missing=[10])
    assert_same_bits(again, never, steps=range(9, STEPS + 1))


def test_a_checkpoint_with_a_batch_that_was_given_up_since_is_condemned(tmp_path: Path) -> None:
    _die(_config(checkpoint={"memory_survives": False}), tmp_path, 18)
    ledger, _ = Ledger.load(tmp_path / "checkpoints" / LEDGER_NAME)
    ledger.skip(10, "said by the test")
    save_ledger(ledger)
    again = run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1)
    assert min(again.losses) == 9
    assert (tmp_path / "checkpoints" / "step-00000016").is_dir(), "made again, without the batch"
    never = run_loop(_config(), tmp_path / "never", rank=0, world_size=1, missing=[10])
    assert_same_bits(again, never, steps=range(9, STEPS + 1))


def test_starting_over_leaves_no_copy_of_before(tmp_path: Path) -> None:
    _die(_config(), tmp_path, 15)
    _die(_config(checkpoint={"resume": False}), tmp_path, 2, attempt=1)
    run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=2)
    assert ("memory", 12) not in _loaded(tmp_path, attempt=2)


def test_copies_of_a_deleted_run_with_the_same_folder_are_not_taken_up(tmp_path: Path) -> None:
    _die(_config(), tmp_path / "run", 15)
    shutil.rmtree(tmp_path / "run")
    again = run_loop(_config(), tmp_path / "run", rank=0, world_size=1)
    assert (_loaded(tmp_path / "run", attempt=0), min(again.losses)) == ([], 1)


def test_another_mesh_or_model_is_not_taken_over(tmp_path: Path) -> None:
    _die(_config(), tmp_path, 15)
    changed = _config(model={"dropout": 0.5})
    run_loop(changed, tmp_path, rank=0, world_size=1, attempt=1)
    assert _loaded(tmp_path) == [("disk", 8)]


def test_without_room_the_copies_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**9))
    faults = ["nan_grad@step=14,rank=0"]
    found: list[Any] = []
    run_loop(_config(), tmp_path, rank=0, world_size=1, faults=faults, change=lambda s: found.append(s.recovery))
    assert "do not fit" in found[0].copies.memory.problem
    events, _, _ = read_events(RunDir(tmp_path).rank_dir(0, 0) / "events.jsonl")
    (rollback,) = (event for event in events if event["kind"] == "rollback")
    assert (rollback["tier"], rollback["to_step"]) == ("memory", 8)
    told = [event["reason"] for event in events if event.get("tier") == "memory" and event.get("state") == "failed"]
    assert told == [found[0].copies.memory.problem]


def test_copies_that_were_removed_from_outside_are_reported(tmp_path: Path) -> None:
    """logind's RemoveIPC removes a user's files in /dev/shm at logout; the training goes on."""

    def change(session: Session) -> None:
        _each_is_hashed(session)
        taken = session.recovery.taken

        def taking(position: Position, batch_index: int) -> Position:
            if position.step == 9:
                remove_shared(tmp_path)
            return taken(position, batch_index)

        session.recovery.taken = taking  # type: ignore[method-assign]

    assert run_loop(_config(), tmp_path, rank=0, world_size=1, change=change).outcome == "finished"
    events = read_events(RunDir(tmp_path).rank_dir(0, 0) / "events.jsonl")[0]
    (failed,) = [e for e in events if e.get("tier") == "memory" and e["state"] == "failed"]
    assert "do not survive a restart" in failed["reason"]


def test_the_number_of_slots_is_bounded(tmp_path: Path) -> None:
    config = _config(checkpoint={"interval": 1, "memory_interval": 1, "asynchronous": True})

    def change(session: Session) -> None:
        _each_is_hashed(session)
        _dies_after(20)(session)

    with pytest.raises(ProcessEnd):
        run_loop(config, tmp_path, rank=0, world_size=1, change=change)
    slots = [path for path in (shared_folder(tmp_path) / "rank-00000").iterdir() if path.suffix == ""]
    assert len([path for path in slots if path.name.startswith("slot")]) <= 4 + 2


def test_only_folders_unused_for_a_while_are_swept(tmp_path: Path) -> None:
    alive, dead = shared_folder(tmp_path / "alive"), shared_folder(tmp_path / "dead")
    for folder, pid in ((alive, os.getpid()), (dead, 2**22 - 1)):
        (folder / "rank-00000").mkdir(parents=True)
        (folder / "rank-00000" / "pid").write_text(str(pid))
    try:
        sweep_stale(tmp_path / "own")
        assert dead.exists(), "a restart may be on its way"
        for path in (alive, alive / "rank-00000", dead, dead / "rank-00000"):
            os.utime(path, (0, 0))
        sweep_stale(tmp_path / "own")
        assert alive.exists()
        assert not dead.exists()
    finally:
        remove_shared(tmp_path / "alive")
        remove_shared(tmp_path / "dead")


def test_data_workers_start_once_the_first_copy_is_hashed(tmp_path: Path) -> None:
    """A worker that was forked while the hashing thread called torch operations for the first time hung, once."""
    is_waited_for = threading.Event()
    sessions = []

    def change(session: Session) -> None:
        sessions.append(session)
        memory, loader = session.recovery.copies.memory, session.training.loader
        seal, wait, start = memory._seal, memory.wait_until_sealed, loader._start  # type: ignore[attr-defined]

        def sealing(copy: Any, *more: Any) -> None:
            assert copy.step or is_waited_for.wait(30)
            seal(copy, *more)

        def waiting() -> None:
            is_waited_for.set()
            wait()

        def starting(first: int) -> Any:
            assert memory._copies[0].sealing is not None
            assert memory._copies[0].sealing.done()
            return start(first)

        memory._seal, memory.wait_until_sealed = sealing, waiting  # type: ignore[method-assign]
        loader._start = starting  # type: ignore[attr-defined]

    config = with_steps(small(data={"num_workers": 1}), 2)
    try:
        assert run_loop(config, tmp_path, rank=0, world_size=1, change=change).outcome == "finished"
    finally:
        sessions[0].training.close()


def test_a_process_that_wakes_up_does_not_reach_the_next_ones_copies(tmp_path: Path) -> None:
    """Of a stopped rank everything is still there, its mapped memory too: it may go on in the middle of a copy."""
    woken: list[Session] = []

    def remember(session: Session) -> None:
        woken.append(session)
        _dies_after(15)(session)

    with pytest.raises(ProcessEnd):
        run_loop(_config(), tmp_path, rank=0, world_size=1, change=remember)
    former = {path.name for path in (shared_folder(tmp_path) / "rank-00000").glob("slot-*")}
    assert former

    def overwrite(session: Session) -> None:
        start = session.recovery.start

        def starting() -> Position:
            position = start()
            for copy in woken[0].recovery.copies.memory._copies:
                for tensor in copy.tensors.values():
                    tensor.fill_(7.0)
            return position

        session.recovery.start = starting  # type: ignore[method-assign]

    faults = ["failing_batch@batch=13"]  # goes back to the copy that was taken over
    again = run_loop(_config(), tmp_path, rank=0, world_size=1, attempt=1, change=overwrite, faults=faults)
    assert _loaded(tmp_path) == [("memory", 12)]
    whole = run_loop(_config(), tmp_path / "whole", rank=0, world_size=1, missing=[13])
    assert_same_bits(again, whole, steps=range(13, STEPS + 1))
