"""Starting over: once, then the run goes on from what it saves; what was before is put aside and stays there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.guard.ledger import LEDGER_NAME, Ledger
from probes.tape.events import read_events
from probes.tape.files.shared_memory import SHARED_MEMORY, remove_shared, shared_folder
from probes.tape.rundir import RunDir
from tests.fakes import ProcessEnd
from tests.processes import run_ranks
from tests.trainer.training_runs import RunResult, run_loop, small, with_steps
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.condemned import note_reason
from trainer.checkpoint.disk_tier.manifest import StorageError
from trainer.checkpoint.state import Position
from trainer.config.config import Config
from trainer.rank.loop import Session

STEPS = 24


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    yield
    remove_shared(tmp_path)


def _config(**checkpoint: Any) -> Config:
    return with_steps(small(checkpoint={"interval": 8, "asynchronous": False, **checkpoint}), STEPS)


def _dies_after(step: int) -> Any:
    def change(session: Session) -> None:
        taken = session.recovery.taken

        def taking(position: Position, batch_index: int) -> Position:
            after = taken(position, batch_index)
            if position.step + 1 == step:
                for copy in session.recovery.copies.memory._copies:
                    if copy.sealing is not None:
                        copy.sealing.result(30)
                raise ProcessEnd
            return after

        session.recovery.taken = taking  # type: ignore[method-assign]

    return change


def _run(folder: Path, attempt: int, config: Config, *, rank: int = 0, world_size: int = 1) -> RunResult:
    return run_loop(config, folder, rank=rank, world_size=world_size, attempt=attempt)


def _die(
    folder: Path, attempt: int, step: int, config: Config, *, rank: int = 0, world_size: int = 1, **more: Any
) -> None:
    change = _dies_after(step)
    with pytest.raises(ProcessEnd):
        run_loop(config, folder, rank=rank, world_size=world_size, attempt=attempt, change=change, **more)


def _ask(folder: Path, attempt: int) -> None:
    """As `rankscope train --resume RUN --set checkpoint.resume=false` does it."""
    RunDir(folder).write_manifest({"start_over_at": attempt})


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _loaded(folder: Path, attempt: int) -> list[tuple[str, int]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, 0) / "events.jsonl")
    return [(event["tier"], event["step"]) for event in events if event.get("state") == "loaded"]


def test_a_restart_goes_on_from_what_was_saved_since_and_what_was_before_stays(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    config = _config(memory_interval=0)
    _die(tmp_path, 0, 17, config)
    before = {step: _content(checkpoints / f"step-{step:08d}") for step in (8, 16)}

    _ask(tmp_path, 1)
    _die(tmp_path, 1, 5, config)  # before it has saved anything
    _die(tmp_path, 2, 9, config)
    assert _loaded(tmp_path, 2) == []
    assert checkpoint_steps(checkpoints) == [8], "of now, not the one of step 16"
    ledger, _ = Ledger.load(checkpoints / LEDGER_NAME)
    assert ledger.good_step is None, "none of those from before is the newest good one"
    assert min(_run(tmp_path, 3, config).losses) == 9

    _ask(tmp_path, 4)
    assert min(_run(tmp_path, 4, config).losses) == 1
    for step, content in before.items():
        assert _content(checkpoints / "before-attempt-1" / f"step-{step:08d}") == content
    assert checkpoint_steps(checkpoints / "before-attempt-4") == [8, 16, 24]

    RunDir(tmp_path).write_manifest({"start_over_at": None})
    assert min(_run(tmp_path, 5, with_steps(config, 25)).losses) == 25
    events, _, _ = read_events(RunDir(tmp_path).rank_dir(1, 0) / "events.jsonl")
    moved = {event["step"]: event["path"] for event in events if event.get("state") == "removed"}
    assert moved == {step: f"checkpoints/before-attempt-1/step-{step:08d}" for step in (8, 16)}


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
def test_copies_in_memory_from_before_are_not_taken_up_and_those_since_are(tmp_path: Path) -> None:
    _die(tmp_path, 0, 15, _config())  # the copy of step 12 is vetted
    place = shared_folder(tmp_path) / "rank-00000"
    kept = {path.name: path.read_bytes() for path in place.iterdir()}

    _ask(tmp_path, 1)
    _die(tmp_path, 1, 2, _config())
    for name, content in kept.items():  # those of a node that was away come back
        (place / name).write_bytes(content)
    _die(tmp_path, 2, 15, _config())
    assert _loaded(tmp_path, 2) == [("memory", 0)], "the state that attempt 1 began with, not that of step 12"
    assert min(_run(tmp_path, 3, _config()).losses) == 13
    assert _loaded(tmp_path, 3) == [("memory", 12)]


def _both_ranks(rank: int, world_size: int, folder: Path) -> list[int]:
    config = with_steps(small(parallel={"dp_shard": 2}, checkpoint={"interval": 8, "asynchronous": False}), STEPS)
    both = {"rank": rank, "world_size": world_size}
    _die(folder, 0, 15, config, **both)
    if rank == 0:
        _ask(folder, 1)
    _die(folder, 1, 11, config, **both)
    last = _run(folder, 2, config, **both)
    return [last.start[0], min(last.losses)]


def test_all_ranks_start_over_and_resume_together(tmp_path: Path) -> None:
    found = run_ranks(_both_ranks, world_size=2, args=(tmp_path,))
    assert found[0] == found[1]
    assert found[0][1] == 9, "the copy of step 8 is vetted by now, that of step 12 is from before"
    assert checkpoint_steps(tmp_path / "checkpoints" / "before-attempt-1") == [8]


def test_condemned_checkpoints_do_not_stop_the_restart(tmp_path: Path) -> None:
    config = _config(memory_interval=0)
    _die(tmp_path, 0, 9, config)
    condemned = tmp_path / "checkpoints" / "step-00000008.condemned"
    condemned.with_suffix("").rename(condemned)
    note_reason(condemned, "it does not have its hash", is_damaged=True)
    _ask(tmp_path, 1)
    _die(tmp_path, 1, 3, config)
    assert min(_run(tmp_path, 2, config).losses) == 1
    assert (tmp_path / "checkpoints" / "before-attempt-1" / condemned.name).is_dir()


def test_a_launcher_that_is_not_ours_asks_by_its_ranks_settings_in_their_first_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(memory_interval=0, resume=False)
    _die(tmp_path, 0, 9, _config(memory_interval=0))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    _die(tmp_path, 1, 9, config)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert min(_run(tmp_path, 2, config).losses) == 9
    assert checkpoint_steps(tmp_path / "checkpoints" / "before-attempt-1") == [8]


def test_checkpoints_that_cannot_be_moved_are_not_overwritten(tmp_path: Path) -> None:
    config = _config(memory_interval=0)
    _die(tmp_path, 0, 9, config)
    _ask(tmp_path, 1)
    (tmp_path / "checkpoints" / "before-attempt-1").touch()  # no folder can be made there
    with pytest.raises(StorageError, match="moved aside"):
        _run(tmp_path, 1, config)
    assert checkpoint_steps(tmp_path / "checkpoints") == [8]
