"""Waits of ranks in a pipeline whose idle time is not known: they are nobody's fault, and no number stands for them."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from analyzers.account.device.exposure import measure as exposure
from analyzers.account.goodput import CATEGORIES, Account, measure
from analyzers.account.step_account import step_accounts
from analyzers.account.wait_split import split_waits
from analyzers.communication.analyze import communication
from analyzers.compare.scaling import scaling_of
from analyzers.compare.two_runs import Comparison, Side, compare
from analyzers.diagnose import diagnose
from analyzers.report.json import to_json
from analyzers.report.terminal.compare_text import tables
from analyzers.report.terminal.scaling_text import render
from analyzers.report.wording.account_lines import goodput_line
from analyzers.run.policy import StallPolicy
from analyzers.scope import Scope
from tests.analyzers.account.test_goodput import Timeline, told
from tests.analyzers.explained import explained
from tests.analyzers.pipeline.test_stage_balance import on_devices
from tests.watch.exporting.trackers.test_feed import Told
from watch.exporting.metrics.run_samples import account_samples, step_samples
from watch.exporting.trackers.feed import TrackerFeed

UNKNOWN = ("straggler", "bubble")


def pipeline(unknown: str, *, steps: int = 12) -> Timeline:
    """Two stages with 20 ms of work in steps of 40 ms. They meet in a call that rank 1 enters 15 ms later."""
    line = Timeline(ranks=2)
    line.event("run_started", 0)
    line.identity(0, pp=(0, 1))
    for step in range(1, steps + 1):
        at = 40 * (step - 1)
        for rank, wait in enumerate((20, 5)):
            line.step(step, at, 40, rank=rank, forward=10, backward=10 + wait, optimizer=20 - wait,
                      backward_wait=wait, collective_wait=wait)  # fmt: skip
            if unknown != "without spans":
                for kind, begin in (("forward", at + 10 * rank), ("backward", at + 30 - 10 * rank)):
                    line.span(kind, begin, begin + 10, rank=rank, step=step, stage=rank, microbatch=0)
        line.call(step, step, [at + 20, at + 35], at + 40)
    line.event("run_ended", 40 * steps, reason="finished")
    if unknown == "stamped":
        line.store.connection.execute("UPDATE steps SET stamped_steps = 1")
    return line


@pytest.fixture(params=["without spans", "stamped"])
def line(request: pytest.FixtureRequest) -> Timeline:
    return pipeline(str(request.param))


def test_waits_within_a_pipeline_are_not_split_where_its_idle_time_is_unknown(line: Timeline) -> None:
    account = line.account()
    assert told(account.by_rank[0]) == {"training": 240, "communication": 240}
    assert told(account.by_rank[1]) == {"training": 420, "communication": 60}
    assert account.basis == ""
    assert [(one.transfer_ns, one.idle_ns) for one in step_accounts(line.store)] == [(None, None)] * 2
    assert goodput_line(account) == "Of 0.5 s of wall time: 69 % training, 31 % communication or waiting for others."


def test_no_output_has_a_number_for_what_is_unknown(line: Timeline) -> None:
    diagnosis = diagnose(line.store, {})
    found: Any = to_json(diagnosis)["goodput"]
    for seconds in (found["seconds"], *found["by_rank"].values()):
        assert [seconds[name] for name in UNKNOWN] == [None, None]
    assert found["seconds"]["communication"] == pytest.approx(0.15)
    assert found["waits_split_by"] is None
    samples = [*account_samples(line.store, StallPolicy(), None, {}), *step_samples(line.store, {})]
    categories = {sample.labels["category"] for sample in samples if sample.name == "rankscope_time_seconds"}
    assert categories == CATEGORIES.keys() - set(UNKNOWN)
    assert not {"rankscope_bubble_ratio", "rankscope_exposed_communication_ratio"} & {one.name for one in samples}
    summary: dict[str, Any] = {}
    tracker: Any = Told()
    tracker.finish = summary.update
    TrackerFeed(tracker).finish(line.store)
    assert summary["time/communication_seconds"] == pytest.approx(0.15)
    assert not {f"time/{name}_seconds" for name in UNKNOWN} & summary.keys()


def test_stamped_waits_of_a_pipeline_are_no_cost_of_communication() -> None:
    """The advice was that 31 % of the step is communication: most of it was a stage without work."""
    line = pipeline("stamped", steps=30)
    line.store.connection.execute("UPDATE collectives SET bytes = 1 << 20")
    (found,) = explained(communication(line.store, Scope()))
    assert (found.kind, found.status) == ("exposed_communication", "insufficient_data")
    assert "the idle time of its pipeline" in found.summary
    assert exposure(line.store, 0).num_steps == 0
    line.store.connection.execute("UPDATE ranks SET pp = 0, dp_shard = rank")
    whole = exposure(line.store, 0)
    assert whole.exposed_ms.sum() == pytest.approx(30 * 25)
    (first, second) = (split_waits(line.store).late_ratio[0, rank] for rank in range(2))
    assert whole.transfer_ms.sum() == pytest.approx(30 * (20 * (1 - first) + 5 * (1 - second)))


def test_a_comparison_with_such_a_run_names_what_both_have() -> None:
    sides = [
        Side(source=line.store, manifest={}, diagnosis=diagnose(line.store, {}))
        for line in (pipeline("without spans"), pipeline(""))
    ]
    found = compare(*sides)
    assert "communication or waiting for others" in _goodput_names(found)
    assert found.goodput["straggler"][0] is found.goodput["bubble"][0] is None
    assert found.goodput["bubble"][1] == pytest.approx(7.5 / 40)
    assert "exposed communication" in _goodput_names(compare(sides[1], sides[1]))


def _goodput_names(comparison: Comparison) -> list[str]:
    return [name for name, *_ in dict(tables(comparison))["Goodput"]]


def test_what_scaling_loses_to_unsplit_waits_is_called_so() -> None:
    sides = []
    for ranks, unknown in ((1, ""), (2, "without spans")):
        account = pipeline(unknown).account()
        source = pipeline(unknown).store
        source.connection.execute(f"UPDATE steps SET tokens = 8; DELETE FROM steps WHERE rank >= {ranks}")
        facts = {"run_id": f"on-{ranks}", "num_ranks": ranks, "tokens": 8, "mesh": {}}
        diagnosis: Any = SimpleNamespace(run=facts, goodput=account)
        sides.append(Side(source=source, manifest={}, diagnosis=diagnosis))
    scaling = scaling_of(sides)
    last = scaling.points[-1]
    assert last.lost_to == "communication or waiting for others"
    output = StringIO()
    render(scaling, Console(file=output, width=200))
    assert "communication or waiting for others 31%" in output.getvalue()
    assert last.shares == pytest.approx({"training": 330 / 480, "communication": 150 / 480, "data": 0.0})


def test_with_its_idle_time_the_waits_of_a_pipeline_are_split() -> None:
    account = pipeline("").account()
    assert account.basis == "collectives"
    assert account.is_split
    assert account.known_seconds["bubble"] == pytest.approx(12 * 0.0075)
    assert account.to_json()["waits_split_by"] == "collectives"


def test_an_attempt_without_idle_time_leaves_the_others_their_split() -> None:
    line = pipeline("")
    line.store.add("ranks", [{"attempt": 1, "rank": rank, "wall_ns": 480 * 10**6, "world_size": 2, "pp": rank}
                             for rank in (0, 1)])  # fmt: skip
    line.step(13, 480, 40, attempt=1, forward=10, backward=30, backward_wait=20, collective_wait=20)
    line.call(13, 13, [500, 500], 520, attempt=1)
    account: Account = line.account()
    assert account.known_seconds["bubble"] > 0
    assert not account.is_split
    assert account.names["communication"] == "communication or waiting for others"


def test_on_devices_without_stamps_the_waits_of_a_pipeline_are_communication_in_flight() -> None:
    """40 of 100 ms were waiting for stragglers, though a stage only received what the other had not made yet."""
    account = measure(on_devices({0: 60, 1: 60}))
    assert account is not None
    found: Any = account.to_json()
    assert found["seconds"]["straggler"] is None
    assert found["seconds"]["bubble"] is None
    assert found["seconds"]["in_flight"] == pytest.approx(0.4 * (found["seconds"]["device"] / 0.6), rel=0.05)
    assert found["waits_split_by"] is None
