"""A drill's judgement, on runs made up for it: seen, rank, cause, seconds, steps lost, false alarms, recovery."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.factories import make_run
from tests.probes.recorded_world import rows
from trainer.drills.score import Score, Wanted, score_run
from trainer.faults.catalogue import CATALOGUE
from trainer.faults.kind import Expected, Recovery
from trainer.faults.options import Fault, parse_fault

NAN = parse_fault("nan_grad@step=12,rank=2")


def nan_run(tmp_path: Path, *, steps: int = 20, rollback: bool = True, **more: Any) -> RunDir:
    """Rank 2's gradients are NaN in step 12, which is refused; told when it struck."""
    run = make_run(tmp_path, steps=steps, nan={2: 12}, gradients_every=1, **more)
    struck_ns = begin_ns(run, rank=2, step=12)
    write(run, 2, "fault_injected", wall_ns=struck_ns, step=12, fault="nan_grad", parameters=NAN.parameters())
    if rollback:
        write(run, 0, "rollback", wall_ns=struck_ns + 10**6, step=12, from_step=12, to_step=11, skipped_batches=[11])
    return run


def begin_ns(run: RunDir, *, rank: int, step: int) -> int:
    """On the tape: opening the store takes as long as the judgement."""
    return min(int(row["start_ns"]) for row in rows(run.rank_dir(0, rank), "steps") if row["step"] == step)


def write(run: RunDir, rank: int, kind: str, *, attempt: int = 0, **detail: Any) -> None:
    folder = run.node_dir(0) if rank == NODE_RANK else run.rank_dir(attempt, rank)
    writer = EventWriter(folder / "events.jsonl", attempt=attempt, rank=rank)
    writer.write(kind, **detail)
    writer.close()


def says(run: RunDir, wall_ns: int, kind: str, ranks: Sequence[int], cause: str, status: str = "fired") -> None:
    """A finding as `watch` tells it."""
    detail = {"analyzer": kind, "finding_kind": kind, "finding_ranks": list(ranks), "cause": cause, "status": status}
    write(run, NODE_RANK, "finding", wall_ns=wall_ns, summary=f"{kind} of {list(ranks)}", **detail)


def score(run: RunDir, faults: Sequence[Fault], *, recovery: Recovery | None = None, steps: int = 20) -> Score:
    expected = [(fault, one) for fault in faults for one in CATALOGUE[fault.kind].expected]
    asked = recovery or (CATALOGUE[faults[0].kind].recovery if faults else "goes_on")
    with Store.open(run) as store:
        return score_run(store, run.manifest(), Wanted(expected=expected, faults=faults, recovery=asked, steps=steps))


def refused_and_taken_again(run: RunDir) -> None:
    """Step 12 once more, which was refused: as an attempt of its own, for the factory writes no rollbacks."""
    make_run(run.path, steps=1, first_step=12, run=run, attempt=1)


def test_a_fault_that_was_named_live(tmp_path: Path) -> None:
    run = nan_run(tmp_path)
    refused_and_taken_again(run)
    says(run, begin_ns(run, rank=2, step=12) + 700_000_000, "non_finite", [2], "backward")
    result = score(run, [NAN])
    (answer,) = result.answers
    assert (answer.seen, answer.right_rank, answer.right_cause) == ("live", True, True)
    assert answer.finding_s == pytest.approx(0.7)
    assert result.false_alarms == ()
    assert result.recovered, result.problems
    assert result.injected
    assert result.num_right == 1
    assert result.steps_lost == 1, "the refused run of step 12"
    assert 0 < result.useful_s <= result.span_s


def test_a_fault_found_only_by_the_post_mortem_was_seen_after(tmp_path: Path) -> None:
    (answer,) = score(nan_run(tmp_path), [NAN]).answers
    assert (answer.seen, answer.right_rank, answer.finding_s) == ("after", True, None)


def test_a_finding_on_the_wrong_rank_is_seen_and_not_right(tmp_path: Path) -> None:
    wrong = parse_fault("nan_grad@step=12,rank=1")
    run = make_run(tmp_path, steps=20, nan={2: 12}, gradients_every=1)
    write(run, 1, "fault_injected", wall_ns=begin_ns(run, rank=1, step=12), fault="nan_grad", parameters={})
    result = score(run, [wrong])
    (answer,) = result.answers
    assert (answer.seen, answer.right_rank) == ("after", False)
    assert result.num_right == 0
    assert result.false_alarms == (), "it counts once, as wrong"


def test_a_live_alarm_that_was_taken_back_is_still_an_alarm(tmp_path: Path) -> None:
    run = nan_run(tmp_path)
    says(run, begin_ns(run, rank=2, step=15), "straggler", [0], "compute")
    says(run, begin_ns(run, rank=2, step=18), "straggler", [0], "compute", status="ok")
    (alarm,) = score(run, [NAN]).false_alarms
    assert (alarm.kind, alarm.ranks) == ("straggler", (0,))


def test_allowed_findings_are_no_alarm_and_missing_required_events_are_problems(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=20)
    slow = parse_fault("slow_disk@step=12,rank=2")
    write(run, 2, "fault_injected", wall_ns=begin_ns(run, rank=2, step=12), fault="slow_disk", parameters={})
    says(run, begin_ns(run, rank=2, step=15), "checkpoint_age", [], "age")
    write(run, 0, "checkpoint", step=10, tier="disk", state="complete", path="checkpoints/step-00000010")

    def judged(**more: Any) -> Score:
        with Store.open(run) as store:
            return score_run(store, run.manifest(), Wanted(faults=[slow], steps=20, **more))

    assert [said.kind for said in judged().false_alarms] == ["checkpoint_age"]
    result = judged(allowed=["checkpoint_age"], required_events=[("checkpoint", "complete"), ("fault_injected", "")])
    assert (result.false_alarms, result.problems) == ((), ())
    result = judged(allowed=["checkpoint_age"], required_events=[("checkpoint", "condemned"), ("fenced", "")])
    assert result.problems == ("no event checkpoint (condemned) was written", "no event fenced was written")
    assert not result.recovered


def test_a_trap_must_be_met_with_silence(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=20)
    pause = parse_fault("pause@step=12,rank=2")
    write(run, 2, "fault_injected", wall_ns=begin_ns(run, rank=2, step=12), fault="pause", parameters={})
    result = score(run, [pause])
    assert (result.answers, result.false_alarms, result.recovered) == ((), (), True)
    says(run, begin_ns(run, rank=2, step=13), "hang", [2], "busy")
    assert [alarm.kind for alarm in score(run, [pause]).false_alarms] == ["hang"]


def test_a_fault_that_never_struck_is_not_injected(tmp_path: Path) -> None:
    result = score(make_run(tmp_path, steps=20), [NAN])
    assert not result.injected
    assert result.answers[0].seen == ""


@pytest.mark.parametrize(
    ("recovery", "problem"),
    [("skips", "not rolled back"), ("restarts", "no restart"), ("stops", "should have stopped")],
)
def test_a_run_that_did_nothing_has_not_recovered(tmp_path: Path, recovery: Recovery, problem: str) -> None:
    result = score(make_run(tmp_path, steps=20), [], recovery=recovery)
    assert not result.recovered
    assert problem in result.problems[-1]


def test_a_run_that_ended_early_has_not_recovered(tmp_path: Path) -> None:
    assert score(make_run(tmp_path, steps=20), []).recovered
    result = score(make_run(tmp_path / "short", steps=15), [])
    assert result.problems == ("a rank recorded only 15 of 20 steps",)
    result = score(make_run(tmp_path / "preempted", steps=20, end="preempted"), [])
    assert result.problems == ("the run did not finish: preempted",)


def test_seconds_until_training_again_after_a_restart(tmp_path: Path) -> None:
    kill = parse_fault("kill@step=12,rank=1")
    run = make_run(tmp_path, steps=20, kill={1: 12})
    struck_ns = begin_ns(run, rank=1, step=12)
    write(run, 1, "fault_injected", wall_ns=struck_ns, step=12, fault="kill", parameters={})
    make_run(run.path, steps=10, first_step=11, run=run, attempt=1)
    result = score(run, [kill])
    assert result.recovered, result.problems
    (answer,) = result.answers
    assert (answer.right_rank, answer.right_cause) == (True, True)
    # Steps 11 (trained again) and 12 (begun): what was run and did not last.
    assert result.steps_lost == 2
    with Store.open(run) as store:
        ((ended_ns,),) = store.rows("SELECT min(start_ns + duration_ns) FROM steps WHERE attempt = 1")
    assert result.training_s == pytest.approx((ended_ns - struck_ns) / 1e9, abs=0.01)


def test_two_faults_of_one_kind_need_two_findings(tmp_path: Path) -> None:
    """One statement does not answer for both."""
    run = nan_run(tmp_path)
    second = parse_fault("nan_grad@step=15,rank=2")
    write(run, 2, "fault_injected", wall_ns=begin_ns(run, rank=2, step=15), fault="nan_grad", parameters={})
    assert [answer.seen for answer in score(run, [NAN, second]).answers] == ["after", ""]


def test_a_finding_must_name_the_expected_ranks(tmp_path: Path) -> None:
    cases: list[tuple[Any, list[int], bool]] = [
        ("rank", [2], True), ("rank", [1, 2], False), ("rank", [], False),
        ("among", [1, 2], True), ("among", [1, 3], False),
        ("none", [], True), ("none", [0, 1, 2, 3], True), ("none", [2], False),
    ]  # fmt: skip
    run = make_run(tmp_path, steps=20)
    struck_ns = begin_ns(run, rank=2, step=12)
    write(run, 2, "fault_injected", wall_ns=struck_ns, step=12, fault="nan_grad", parameters={})
    for number, (_, ranks, _) in enumerate(cases):  # a kind for each: one judgement of the run answers for all
        says(run, struck_ns + number + 1, f"kind {number}", ranks, "stopped")
    expected = [(NAN, Expected((f"kind {n}",), ("stopped",), whose)) for n, (whose, _, _) in enumerate(cases)]
    with Store.open(run) as store:
        answers = score_run(store, run.manifest(), Wanted(expected=expected, faults=[NAN], steps=20)).answers
    assert [(answer.seen, answer.right_rank) for answer in answers] == [("live", right) for *_, right in cases]
