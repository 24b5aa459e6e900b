"""The proof of rollback: after bad batches the run is, to the last bit, the one whose data never held them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes.guard.decisions import Verdict
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.depth import later
from tests.fakes import ProcessEnd
from tests.processes import run_ranks
from tests.trainer.training_runs import RunResult, assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.state import Position
from trainer.data.batches import Batch
from trainer.rank.loop import Session

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "fsdp": (2, {"dp_shard": 2}),
    "fsdp x tp": (4, {"dp_shard": 2, "tp": 2}),
}
STEPS = 26
# Batch 9: a loss of NaN, between two copies. Batches 24 and 25: random tokens, one after the other.
FAULTS = ("failing_batch@batch=9", "bad_batch@batch=24", "bad_batch@batch=25")
BAD_BATCHES = [9, 24, 25]


def _meet_bad_batches(rank: int, world_size: int, folder: Path, layouts: dict[str, dict[str, Any]]) -> list[RunResult]:
    found = []
    for name, parallel in layouts.items():
        config = with_steps(small(parallel=parallel, model={"num_layers": 1}), STEPS)
        met = run_loop(config, folder / name / "met", rank=rank, world_size=world_size, faults=FAULTS)
        assert met.skipped == BAD_BATCHES, met.tried
        never = run_loop(config, folder / name / "never", rank=rank, world_size=world_size, missing=BAD_BATCHES)
        assert never.skipped == []
        assert_same_bits(met, never)
        found.append(met)
    return found


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=later("tensor parallel beside: trainer/launcher/test_resume.py"))]
)
def test_a_run_that_skipped_is_the_run_that_never_saw_the_batches(world_size: int, tmp_path: Path) -> None:
    layouts = {name: parallel for name, (size, parallel) in LAYOUTS.items() if size == world_size}
    ranks = run_ranks(_meet_bad_batches, world_size=world_size, args=(tmp_path, layouts), deadline_s=300)
    for number, name in enumerate(layouts):
        results = [rank[number] for rank in ranks]
        assert all(result.batches == results[0].batches for result in results), "ranks trained on different batches"
        _check_account(results[0], tmp_path / name / "met")


def _check_account(result: RunResult, folder: Path) -> None:
    """Each batch is trained or skipped, exactly once, and the events say so."""
    trained = [result.batches[step] for step in range(1, STEPS + 1)]
    assert sorted(trained + BAD_BATCHES) == list(range(STEPS + len(BAD_BATCHES)))
    events, _, torn = read_events(RunDir(folder).rank_dir(0, 0) / "events.jsonl")
    assert torn == 0
    assert [event["batch_index"] for event in events if event["kind"] == "batch_skipped"] == BAD_BATCHES
    rollbacks = [event for event in events if event["kind"] == "rollback"]
    # The copy of step 8 is too young to be trusted at step 10.
    assert [(event["from_step"], event["to_step"]) for event in rollbacks] == [(10, 4), (24, 20), (24, 20)]
    assert {event["tier"] for event in rollbacks} == {"memory"}
    assert [event["skipped_batches"] for event in rollbacks] == [[batch] for batch in BAD_BATCHES]


def test_without_copies_in_memory_the_disk_is_gone_back_to(tmp_path: Path) -> None:
    config = with_steps(small(checkpoint={"memory_interval": 0, "asynchronous": False}), 20)
    met = run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=["failing_batch@batch=13"])
    never = run_loop(config, tmp_path / "never", rank=0, world_size=1, missing=[13])
    assert_same_bits(met, never)
    events, _, _ = read_events(RunDir(tmp_path / "met").rank_dir(0, 0) / "events.jsonl")
    (rollback,) = (event for event in events if event["kind"] == "rollback")
    assert (rollback["tier"], rollback["to_step"]) == ("disk", 8)


def test_without_any_copy_the_step_alone_is_undone(tmp_path: Path) -> None:
    config = with_steps(small(checkpoint={"memory_interval": 0, "interval": 0}), 20)
    met = run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=["failing_batch@batch=13"])
    never = run_loop(config, tmp_path / "never", rank=0, world_size=1, missing=[13])
    assert_same_bits(met, never)
    assert met.tried[13:15] == [(14, 13), (14, 14)]


def test_a_checkpoint_from_after_the_poison_is_condemned(tmp_path: Path) -> None:
    """Step 16 is saved and spoilt at step 17: the copy of step 12 is the newest good one, and 16 may not come back."""
    config = with_steps(small(checkpoint={"asynchronous": False}), 20)
    run_loop(config, tmp_path, rank=0, world_size=1, faults=["nan_grad@step=17,rank=0"])
    assert (tmp_path / "checkpoints" / "step-00000016.condemned").is_dir()
    events, _, _ = read_events(RunDir(tmp_path).rank_dir(0, 0) / "events.jsonl")
    states = [event["state"] for event in events if event.get("tier") == "disk" and event["step"] == 16]
    once = ["writing", "complete", "verified"]
    assert states == [*once, "condemned", *once, "good"], "the replay saves it again"


def test_dropout_is_replayed_too(tmp_path: Path) -> None:
    config = with_steps(small(model={"dropout": 0.1}), 20)
    met = run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=["failing_batch@batch=13"])
    never = run_loop(config, tmp_path / "never", rank=0, world_size=1, missing=[13])
    assert_same_bits(met, never)


def test_a_transient_fault_costs_no_batch(tmp_path: Path) -> None:
    config = with_steps(small(), 20)
    met = run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=["nan_grad@step=14,rank=0"])
    assert_same_bits(met, run_loop(config, tmp_path / "clean", rank=0, world_size=1))
    (rollback,) = (event for event in _events(tmp_path / "met", 0) if event["kind"] == "rollback")
    assert (rollback["skipped_batches"], rollback["replayed_batches"]) == ([], [13])


def test_results_really_differ_if_the_batch_is_kept(tmp_path: Path) -> None:
    """The proof would be worth nothing if the comparison could not fail."""
    config = with_steps(small(), 16)
    one = run_loop(config, tmp_path / "one", rank=0, world_size=1, missing=[13])
    other = run_loop(config, tmp_path / "other", rank=0, world_size=1)
    with pytest.raises(AssertionError):
        assert_same_bits(one, other)


@pytest.mark.parametrize("moment", ["before the decision is on the disk", "after it", "after the state is restored"])
def test_killed_in_the_middle_of_a_rollback(moment: str, tmp_path: Path) -> None:
    """The next attempt ends with the same bits, and the batch is skipped once."""

    def die(session: Session) -> None:
        recovery = session.recovery
        places = {
            "before the decision is on the disk": (recovery.copies.ledger_file, "save"),
            "after it": (recovery.copies, "restore"),
        }

        def killed(*arguments: Any) -> Any:
            raise ProcessEnd

        if moment in places:
            setattr(*places[moment], killed)
        else:
            load = recovery.guard.load
            recovery.guard.load = lambda state: (load(state), killed())  # type: ignore[method-assign]

    # A save in the background would outlive the killed attempt here: its thread ends with a process, not with the loop.
    config = with_steps(small(checkpoint={"asynchronous": False}), 16)
    # The batch itself is bad, so that an attempt that does not know of it meets it again.
    spoil = ["bad_batch@batch=9"]
    with pytest.raises(ProcessEnd):
        run_loop(config, tmp_path / "met", rank=0, world_size=1, faults=spoil, change=_refusing(9, die))
    again = run_loop(config, tmp_path / "met", rank=0, world_size=1, attempt=1, faults=spoil, change=_refusing(9))
    assert again.skipped == [9]
    never = run_loop(config, tmp_path / "never", rank=0, world_size=1, missing=[9])
    assert_same_bits(again, never, steps=range(9, 17))
    told = [event for attempt in (0, 1) for event in _events(tmp_path / "met", attempt)]
    assert len([event for event in told if event["kind"] == "batch_skipped"]) <= 1


def test_a_poisoned_checkpoint_that_a_restart_has_loaded_is_left_for_the_one_before(tmp_path: Path) -> None:
    """Killed after a poisoned save and before the poison showed: the restart finds out, and goes further back."""
    config = with_steps(small(checkpoint={"asynchronous": False}), 20)

    def poison(session: Session) -> None:
        recovery, taken = session.recovery, session.recovery.taken

        def poisoning(position: Position, batch_index: int) -> Position:
            if position.step == 15:
                next(session.training.modules[0].parameters()).data.fill_(float("nan"))
                taken(position, batch_index)  # saves step 16
                raise ProcessEnd
            return taken(position, batch_index)

        recovery.taken = poisoning  # type: ignore[method-assign]

    with pytest.raises(ProcessEnd):
        run_loop(config, tmp_path / "met", rank=0, world_size=1, change=poison)
    again = run_loop(config, tmp_path / "met", rank=0, world_size=1, attempt=1)
    rollback = next(event for event in _events(tmp_path / "met", 1) if event["kind"] == "rollback")
    assert (rollback["from_step"], rollback["to_step"], rollback["tier"]) == (17, 8, "disk")
    assert (tmp_path / "met" / "checkpoints" / "step-00000016.condemned").is_dir()
    assert again.outcome == "finished"
    # The innocent batch that showed the poison is gone; everything else is as if nothing had happened.
    never = run_loop(config, tmp_path / "never", rank=0, world_size=1, missing=again.skipped)
    assert_same_bits(again, never, steps=range(9, 21))


def _refusing(batch_index: int, more: Callable[[Session], None] | None = None) -> Callable[[Session], None]:
    """A guard that finds one batch bad, whatever its loss: these runs are too short for the detector."""

    def change(session: Session) -> None:
        guard, judge = session.recovery.guard, session.recovery.guard.judge

        def judging(step: int, loss: float, grad_norm: float) -> Verdict:
            current = session.training.loader.last_index  # type: ignore[attr-defined]
            if current == batch_index:
                return Verdict(step=step, kind="spike", reason="said by the test")
            return judge(step, loss, grad_norm)

        guard.judge = judging  # type: ignore[method-assign]
        session.training.loader = _Remembering(session.training.loader)  # type: ignore[assignment]
        if more is not None:
            more(session)

    return change


class _Remembering:
    """A loader that knows which batch it handed out last."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.last_index = -1

    def batch(self, batch_index: int) -> Batch:
        self.last_index = batch_index
        return self.inner.batch(batch_index)


def _events(folder: Path, attempt: int) -> list[dict[str, Any]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, 0) / "events.jsonl")
    return events
