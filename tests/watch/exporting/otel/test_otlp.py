"""Spans, metrics and logs as a collector receives them, from synthetic runs through the real store."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from store import Store
from tests.factories import make_run
from tests.watch.exporting.otel.collector import attributes, collector
from watch.exporting.metrics.node_metrics import NodeMetrics
from watch.exporting.otel.otlp import is_configured, otlp
from watch.exporting.otel.step_spans import GROUPS, RANKS, StepSpans

STEPS = 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("run"), ranks=12, steps=STEPS, nan={1: 10})


def taken(run: RunDir, group: str = "default", ranks: str = "all_ranks", **more: bool) -> list:  # type: ignore[type-arg]
    with Store.open(run) as store:
        return StepSpans(run_id="demo", group=group, ranks=ranks, **more).take(store)


def test_a_trace_a_step_that_all_ranks_share(run: RunDir) -> None:
    spans = taken(run)
    roots = {span.span_id: span for span in spans if span.parent_id is None}
    assert len(roots) == len({root.trace_id for root in roots.values()}) == STEPS
    own = [span for span in spans if span.parent_id is not None]
    assert len(own) == STEPS * 12
    for span in own:
        root = roots[span.parent_id]
        assert root.trace_id == span.trace_id
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns
    assert sum(span.is_error for span in own) == 12  # the refused step


def test_ids_are_the_same_on_every_node_and_other_in_every_run(run: RunDir) -> None:
    first, again = taken(run), taken(run, is_first_node=False)
    ids = {span.span_id for span in first}
    assert len(ids) == len(first)
    assert all(span.parent_id in ids and span.span_id in ids for span in again)  # only the roots are missing
    with Store.open(run) as store:
        other = StepSpans(run_id="other", group="default", ranks="all_ranks").take(store)
    assert not {span.trace_id for span in other} & {span.trace_id for span in first}


@pytest.mark.parametrize(
    ("ranks", "count"), [("single_rank", 1), ("first_rank_per_node", 1), ("sampled", 8), ("all_ranks", 12)]
)
def test_strategies_choose_ranks(run: RunDir, ranks: str, count: int) -> None:
    named = Counter(span.attributes.get("rankscope.rank") for span in taken(run, ranks=ranks))
    del named[None]
    assert len(named) == count
    assert set(named.values()) == {STEPS}


def test_groups_add_detail(run: RunDir) -> None:
    names = {group: Counter(span.name for span in taken(run, group, "single_rank")) for group in GROUPS}
    assert set(names["default"]) == {"train.step", "rank 0"}
    assert names["per_step"]["forward"] == names["per_step"]["backward"] == STEPS
    assert names["all"]["all_reduce"] >= STEPS
    assert names["per_step"].keys() < names["all"].keys()


def test_a_span_of_a_rank_has_the_account_of_its_step(run: RunDir) -> None:
    spans = taken(run, "per_step", "single_rank")
    ranks = [span for span in spans if span.name == "rank 0"]
    parts = {"rankscope.own_work", "rankscope.waiting", "rankscope.not_measured"}
    for span in ranks:
        took_s = (span.end_ns - span.start_ns) / 1e9
        assert sum(float(span.attributes[name]) for name in parts) == pytest.approx(took_s)
        inside = [child for child in spans if child.parent_id == span.span_id]
        assert all(span.start_ns <= child.start_ns <= child.end_ns <= span.end_ns for child in inside)


def test_each_step_is_taken_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=10, end="")
    spans = StepSpans(run_id="demo", group="default", ranks="all_ranks")
    with Store.open(run) as store:
        assert len(spans.take(store)) == 30
        assert spans.take(store) == []
    make_run(tmp_path, run=run, ranks=2, steps=5, attempt=1, first_step=11)
    with Store.open(run) as store:
        assert len(spans.take(store)) == 15


def test_a_collector_gets_all_three_signals(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue")
        assert is_configured()
        with Store.open(run) as store:
            rows = StepSpans(run_id="demo", group="per_step", ranks="single_rank").take(store)
            samples = NodeMetrics(run.manifest(), node_rank=0).measure(store, time.time_ns())
        finding = {"kind": "hang", "severity": "critical", "summary": "rank 3 hangs", "ranks": [3], "first_step": 7}
        with otlp(run_id="demo", node_rank=2) as sender:
            sender.spans(rows)
            sender.metrics(samples, time.time_ns())
            sender.logs([finding], time.time_ns())
        assert (sender.num_sent, sender.num_dropped) == (3, 0)
    assert received.resource["rankscope.run_id"] == "demo"
    assert (received.resource["rankscope.node"], received.resource["team"]) == (2, "blue")
    assert len(received.spans) == len(rows)
    by_id = {span.span_id: span for span in received.spans}
    child = next(span for span in received.spans if span.name == "rank 0")
    assert by_id[child.parent_span_id].name == "train.step"
    assert child.trace_id == by_id[child.parent_span_id].trace_id
    assert attributes(child)["rankscope.rank"] == 0
    assert received.metrics["rankscope.step"].gauge.data_points[0].as_double == STEPS
    counted = received.metrics["rankscope.steps"]
    assert (counted.sum.is_monotonic, counted.unit) == (True, "1")
    assert received.metrics["rankscope.step.duration"].unit == "s"
    assert len(received.metrics["rankscope.rank.own"].gauge.data_points) == 12
    (record,) = received.logs
    assert (record.severity_text, record.body.string_value) == ("CRITICAL", "rank 3 hangs")
    assert attributes(record)["rankscope.first_step"] == 7


@pytest.mark.parametrize("collects", [False, True], ids=["dead", "slow"])
def test_a_dead_or_slow_collector_delays_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    monkeypatch.setattr("watch.exporting.otel.otlp.CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")  # seconds: who waits for one request is seen
    with collector() as received:
        received.holds = True
        url = received.url if collects else "http://127.0.0.1:1"  # nobody listens there
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        rows = taken(run, "per_step")
        start = time.monotonic()
        with otlp(run_id="demo", node_rank=0) as sender:
            for _ in range(200):
                sender.spans(rows[:10])
        assert received.answered == 0, "neither the offers nor the end waited for an answer"
        assert time.monotonic() - start < 90
        assert sender.num_dropped >= 100


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [({}, False), ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
     ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, False)],
)  # fmt: skip
def test_it_is_off_unless_an_endpoint_is_set(environment: dict[str, str], is_wanted: bool) -> None:
    assert is_configured(environment) == is_wanted


def test_the_configuration_knows_the_same_words() -> None:
    from typing import get_args

    from trainer.config.export import OtelConfig

    assert get_args(OtelConfig.model_fields["group"].annotation) == GROUPS
    assert get_args(OtelConfig.model_fields["ranks"].annotation) == RANKS
