"""A node's samples from synthetic runs through the real store."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from analyzers.run.policy import StallPolicy
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.factories import empty_run, make_run
from watch.exporting.metrics.catalogue import METRICS, Sample
from watch.exporting.metrics.node_metrics import STALLED_HOLD_S, STATES, NodeMetrics
from watch.exporting.metrics.run_samples import scalar_samples


def measured(run: RunDir) -> list[Sample]:
    with Store.open(run) as store:
        samples = NodeMetrics(run.manifest(), node_rank=0, stall=StallPolicy()).measure(store, time.time_ns())
    for sample in samples:
        assert set(sample.labels) <= set(METRICS[sample.name].labels), sample
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
    assert len(keys) == len(set(keys)), "a series twice"
    return samples


def value(samples: list[Sample], name: str, **labels: str) -> float:
    (found,) = [s.value for s in samples if s.name == f"rankscope_{name}" and labels.items() <= s.labels.items()]
    return found


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    run = make_run(tmp_path_factory.mktemp("run"), ranks=4, steps=60, step_ms=50.0, slow={2: 1.5}, nan={1: 30})
    return measured(run)


def test_the_newest_steps(samples: list[Sample]) -> None:
    assert value(samples, "step") == 60
    assert value(samples, "world_size") == 4
    assert value(samples, "step_duration_seconds", stat="median") == pytest.approx(0.075, rel=0.1)
    assert 0 < value(samples, "exposed_communication_ratio") < 0.2
    assert value(samples, "steps_total") + value(samples, "steps_discarded_total") == 60
    assert value(samples, "loss") > 0


def test_logged_numbers_are_the_mean_of_each_ranks_newest() -> None:
    store = MemoryStore()
    rows = [(0, 9, 0, 5.0), (0, 9, 2, 7.0), (1, 2, 0, 0.25), (1, 2, 1, 0.75), (1, 1, 1, 9.0)]
    store.add(
        "scalars",
        [{"attempt": attempt, "step": step, "rank": rank, "name": "accuracy", "value": number}
         for attempt, step, rank, number in rows],
    )  # fmt: skip
    assert [*scalar_samples(store)] == [Sample("rankscope_logged_value", 0.5, {"name": "accuracy"})]
    assert [*scalar_samples(MemoryStore())] == []


def test_a_straggler_shows_in_its_own_time_and_not_in_its_steps(samples: list[Sample]) -> None:
    own = [value(samples, "rank_own_seconds", rank=str(rank)) for rank in range(4)]
    took = [value(samples, "rank_step_duration_seconds", rank=str(rank)) for rank in range(4)]
    assert own[2] > 1.3 * own[0]
    assert max(took) < 1.1 * min(took)


def test_exactly_one_state_is_set_and_time_adds_up(samples: list[Sample]) -> None:
    words = {sample.labels["state"]: sample.value for sample in samples if sample.name == "rankscope_run_state"}
    assert set(words) == set(STATES)
    assert [word for word, is_so in words.items() if is_so] == ["finished"]
    seconds = [sample.value for sample in samples if sample.name == "rankscope_time_seconds"]
    assert value(samples, "goodput_ratio") == pytest.approx(
        value(samples, "time_seconds", category="training") / sum(seconds)
    )


def test_a_rank_that_finished_is_neither_up_nor_dead(samples: list[Sample], tmp_path: Path) -> None:
    assert not [sample for sample in samples if sample.name == "rankscope_rank_up"]
    killed = measured(make_run(tmp_path, ranks=3, steps=40, kill={1: 20}))
    up = {sample.labels["rank"]: sample.value for sample in killed if sample.name == "rankscope_rank_up"}
    assert up["1"] == 0
    assert value(killed, "rank_deaths_total") >= 1


def _finding(events: EventWriter, kind: str, status: str, **more: object) -> None:
    events.write("finding", analyzer=kind, finding_kind=kind, severity="warning", status=status, summary=kind, **more)


def test_findings_are_open_until_they_are_reported_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=20)
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    slow = {"finding_ranks": [1], "cause": "data", "evidence": {"factor_ratio": 1.5}}
    _finding(node, "straggler", "fired", **slow)
    _finding(node, "straggler", "fired", **(slow | {"evidence": {"factor_ratio": 2.5}}))
    _finding(node, "non_finite", "fired", first_step=7)
    _finding(node, "hang", "fired")
    _finding(node, "hang", "ok")
    node.close()
    samples = measured(run)
    assert value(samples, "findings", kind="straggler") == 1
    assert value(samples, "straggler_excess_ratio", rank="1", cause="data") == pytest.approx(1.5)
    assert value(samples, "findings", kind="non_finite") == 1
    assert not [s for s in samples if s.name == "rankscope_findings" and s.labels["kind"] == "hang"]
    assert value(samples, "findings_total", kind="straggler") == 2
    assert value(samples, "findings_total", kind="hang") == 1


def test_a_run_without_a_record_says_so(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir(parents=True)
    EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK).write("watch_started", pid=1)
    samples = measured(run)
    assert value(samples, "run_state", state="starting") == 1
    assert not [sample for sample in samples if "step" in sample.name]


def test_a_hang_counts_as_stalled_until_every_scrape_has_seen_it(tmp_path: Path) -> None:
    """Its culprit is killed within a second or two: between two scrapes there may be no sign of it."""
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir(parents=True)
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    node.write("watch_started", pid=1)
    _finding(node, "hang", "fired")
    now_ns = time.time_ns()
    for later_s, is_stalled in ((0.0, 1), (STALLED_HOLD_S + 5.0, 0)):
        with Store.open(run) as store:
            metrics = NodeMetrics(run.manifest(), node_rank=0, stall=StallPolicy())
            samples = metrics.measure(store, now_ns + int(later_s * 1e9))
        assert value(samples, "run_state", state="stalled") == is_stalled


def test_a_hang_that_is_measured_late_is_shown_as_long(tmp_path: Path) -> None:
    """A round of `watch` may come after the recovery where cores are few: the alert must fire all the same."""
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir(parents=True)
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    node.write("watch_started", pid=1)
    metrics = NodeMetrics(run.manifest(), node_rank=0, stall=StallPolicy())
    with Store.open(run) as store:
        metrics.measure(store, time.time_ns())
    _finding(node, "hang", "fired")
    late_ns = time.time_ns() + int(3 * STALLED_HOLD_S * 1e9)
    for later_s, is_stalled in ((0.0, 1), (STALLED_HOLD_S - 1.0, 1), (STALLED_HOLD_S + 1.0, 0)):
        with Store.open(run) as store:
            samples = metrics.measure(store, late_ns + int(later_s * 1e9))
        assert value(samples, "run_state", state="stalled") == is_stalled
