from __future__ import annotations

from dataclasses import replace

import pytest

from analyzers.compare.gate import GateError, failures, gates_of
from analyzers.compare.two_runs import Comparison
from analyzers.finding import Finding
from analyzers.stragglers.throughput import Change


def comparison(low: float | None = 1.08, *, only_b: tuple[Finding, ...] = ()) -> Comparison:
    speed = low and Change(ratio=low + 0.05, low=low, high=low + 0.1, per_token=True, ms_before=40.0, ms_after=45.0)
    return Comparison(
        run_a="before", run_b="after", settings=(), versions=(), speed=speed or None, phases={}, loss=None, only_a=(),
        only_b=only_b, both=(), goodput={}, findings=(),
    )  # fmt: skip


def new(severity: str) -> Finding:
    return Finding(analyzer="x", kind="straggler", severity=severity, status="fired", summary="Rank 1 is slow.")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gate", "low", "fails"),
    [("slower", 1.08, True), ("slower", 1.03, False), ("slower:10", 1.08, False), ("slower:7.5%", 1.08, True),
     ("slower:0", 0.99, False), ("warning", 1.08, True)],
)  # fmt: skip
def test_slower_by_more_than_the_limit(gate: str, low: float, fails: bool) -> None:
    reasons = failures(comparison(low), gates_of([gate]))
    assert bool(reasons) == fails
    if fails:
        assert reasons[0].startswith("after is slower: it takes 13.0 % more time per token"), reasons


def test_too_few_steps_are_not_as_fast_as_before() -> None:
    assert failures(comparison(None), gates_of(["slower", "loss"])) == [
        "The speed of after was not compared: there are too few steps",
        "The loss of after was not compared: there are too few common steps",
    ]


def test_new_findings_by_severity() -> None:
    with_warning = comparison(only_b=(new("warning"),))
    assert failures(with_warning, gates_of(["critical"])) == []
    assert failures(with_warning, gates_of(["findings"])) == ["after has new findings: straggler: Rank 1 is slow."]
    with_both = comparison(only_b=(new("warning"), new("critical")))
    assert failures(with_both, gates_of(["critical"])) == ["after has new findings: straggler: Rank 1 is slow."]
    in_both_runs = replace(comparison(), both=(new("critical"),))
    assert failures(in_both_runs, gates_of(["critical", "findings"])) == []


@pytest.mark.parametrize("text", ["speed", "loss:3", "slower:", "slower:much", "slower:-3", "slower:nan"])
def test_an_invalid_condition_is_refused(text: str) -> None:
    with pytest.raises(GateError):
        gates_of([text])


def test_a_loss_that_ended_as_nan_is_not_as_low_as_before() -> None:
    def failed(since: tuple[int | None, int | None]) -> list[str]:
        return list(failures(replace(comparison(), nonfinite_since=since), gates_of(["loss"])))

    assert failed((None, 1_032)) == ["The loss of after is NaN or Inf from step 1032 on."]
    assert failed((5, 1_032)) == [], "as before"
