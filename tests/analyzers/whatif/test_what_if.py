"""What-if against the truth: the same simulated run, with the fault and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from analyzers.report.html import diagnosis_page as html
from analyzers.report.json import to_json
from analyzers.report.wording.account_lines import what_if_line
from analyzers.report.wording.explained import next_step
from analyzers.whatif.step_graph import load_graph
from analyzers.whatif.what_if import WhatIf, exceeds_error, measure, removed_share, without
from store import Store
from tests.depth import later
from tests.support.simulator import QUIET, SHARED_HOST, Fault, Layout, Scenario, simulate, write
from tests.support.simulator.recording import Recording

ONSET = 12
LAYOUTS = {
    "ddp": Layout(dp_replicate=4),
    "fsdp": Layout(dp_shard=4),
    "fsdp_tp": Layout(dp_shard=4, tp=2),
    "pp": Layout(pp=2, dp_replicate=2, microbatches=4, layers=1),
    "gpipe": Layout(pp=4, dp_shard=2, microbatches=8, layers=1, schedule="gpipe"),
}


def scenario(layout: str, kind: str = "slow_compute", factor: float = 1.5) -> Scenario:
    fault = Fault(kind=kind, rank=1, step=ONSET, factor=factor)
    noise = SHARED_HOST if layout in ("ddp", "pp") else QUIET
    return Scenario(seed=5, layout=LAYOUTS[layout], steps=36, noise=noise, backend="gloo", fault=fault)


def step_ms(recording: Recording) -> float:
    """Mean of the steps after the onset."""
    steps = recording.log.columns("steps", recording.until)
    chosen = (steps["rank"] == 0) & (steps["step"] > ONSET + 1)
    begin, end = steps["start_ns"][chosen].min(), (steps["start_ns"] + steps["duration_ns"])[chosen].max()
    return float(end - begin) / 1e6 / float(chosen.sum())


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[object]:
    opened: list[Store] = []

    def store(recording: Recording) -> Store:
        opened.append(Store.open(write(recording, tmp_path / "run")))
        return opened[-1]

    yield store
    for one in opened:
        one.close()


SLOW_DATA_IN = ("fsdp", "gpipe")
"""In the other layouts the rank computes slowly; at night each rank does both in each layout."""


@pytest.mark.parametrize(
    ("layout", "kind", "factor"),
    [
        pytest.param(
            layout, kind, factor, marks=[] if (kind == "slow_data") == (layout in SLOW_DATA_IN) else later("beside it")
        )
        for kind, factor in (("slow_compute", 1.5), ("slow_data", 1.3))
        for layout in LAYOUTS
    ],
)
def test_the_step_without_it_is_what_it_really_takes_without_it(layout: str, kind: str, factor: float, stored) -> None:  # type: ignore[no-untyped-def]
    made = scenario(layout, kind, factor)
    with_it, truth = simulate(made), simulate(replace(made, fault=None))
    found = load_graph(stored(with_it), 0, ONSET + 2, made.steps)
    assert found is not None
    assert (found.basis, found.replay_error_ratio < 0.01) == ("calls", True)
    assert found.measured_ms == pytest.approx(step_ms(with_it), rel=0.01)
    peers = [rank for rank in range(made.layout.num_ranks) if rank // made.layout.width == 1 // made.layout.width]
    assert without(found, [1], {1: peers}) == pytest.approx(step_ms(truth), rel=0.01)


def test_the_finding_and_the_report_say_it(stored) -> None:  # type: ignore[no-untyped-def]
    made = replace(scenario("fsdp"), steps=45)
    store = stored(simulate(made))
    diagnosis = diagnose(store, {})
    (finding,) = (finding for finding in diagnosis.fired if finding.kind == "straggler")
    truth = step_ms(simulate(replace(made, fault=None)))
    assert finding.evidence["step_without_it_ms"] == pytest.approx(truth, rel=0.01)
    assert finding.evidence["whatif_basis"] == "calls"
    assert finding.cost_s == pytest.approx((step_ms(simulate(made)) - truth) * (45 - ONSET + 1) / 1e3, rel=0.03)
    assert finding.evidence["run_s"] - finding.evidence["run_without_it_s"] == pytest.approx(finding.cost_s, abs=0.01)
    what = diagnosis.what_if
    assert isinstance(what, WhatIf)
    assert what.worst_ranks == (1,)
    assert what.slowdown > 1.2
    assert "Balancing rank 1 alone gives" in what_if_line(what)
    assert to_json(diagnosis)["what_if"]["slowdown_ratio"] == round(what.slowdown, 4)


@pytest.mark.parametrize("without_calls", [False, True])
def test_an_evaluation_hides_no_gain(without_calls: bool, stored) -> None:  # type: ignore[no-untyped-def]
    made = scenario("ddp")
    made = replace(
        made,
        job=replace(made.job, checkpoint_interval=0, evaluate_interval=15, evaluate_s=1.0),
        steps=45,
        missing_tables=("collectives",) if without_calls else (),
    )
    what = measure(stored(simulate(made)))
    assert what is not None
    assert what.basis == ("steps" if without_calls else "calls")
    assert what.error_ratio < 0.05, "the ranks evaluate without a call, so only the length of these steps is unusual"
    assert what.is_beyond_error


def test_without_calls_the_steps_say_nearly_as_much(stored) -> None:  # type: ignore[no-untyped-def]
    made = replace(scenario("ddp"), missing_tables=("collectives",))
    found = load_graph(stored(simulate(made)), 0, ONSET + 2, made.steps)
    assert found is not None
    assert found.basis == "steps"
    assert without(found, [1], {1: [0, 1, 2, 3]}) == pytest.approx(
        step_ms(simulate(replace(made, fault=None))), rel=0.03
    )


def test_nothing_to_gain_and_nothing_to_replay(stored) -> None:  # type: ignore[no-untyped-def]
    what = measure(stored(simulate(replace(scenario("ddp"), fault=None, noise=QUIET))))
    assert what is not None
    assert what.slowdown < 1.02
    assert what.basis == "calls"


def slow(**evidence: object) -> Finding:
    return Finding(
        analyzer="straggler", kind="straggler", severity="warning", status="fired", summary="", ranks=(3,),
        cause="compute", evidence=evidence, advice="straggler-compute",
    )  # fmt: skip


def test_a_gain_is_said_with_the_error_of_its_replay_and_not_if_it_is_smaller() -> None:
    clear, lost = {"speedup_without_it_ratio": 1.31}, {"speedup_without_it_ratio": 1.04}
    assert "would be 1.31x faster without it (prediction error 1.2 %)." in next_step(
        slow(**clear, replay_error_ratio=0.012)
    )
    assert "without it" not in next_step(slow(**lost, replay_error_ratio=0.098))
    assert "1.04x faster without it." in next_step(slow(**lost, replay_error_ratio=None)), "nothing replayed"
    part = slow(**clear, replay_error_ratio=0.012, replayed_first_step=111, replayed_last_step=150)
    assert "Steps 111 to 150 would be 1.31x" in next_step(replace(part, first_step=62, last_step=150))
    assert exceeds_error(1.12, 0.1)
    assert not exceeds_error(1.11, 0.1), "10 % of a step that is 1.11 times as long"


@pytest.mark.parametrize(
    ("without_ms", "error_ratio", "share"),
    [
        (110.0, 0.01, 0.5),
        (92.0, 0.01, 1.0),  # a stage's work that is removed, and not spread over the others
        (120.5, 0.01, 0.0),
        (135.0, 0.01, None),  # balancing slows nothing down: the prediction doesn't hold
        (110.0, 0.2, None),
    ],
)
def test_a_removed_share_is_a_share_or_not_known(without_ms: float, error_ratio: float, share: float | None) -> None:
    """It was 1.52 and -0.79 in reports, whose text said 100 % and nothing."""
    assert removed_share(120.0, 100.0, without_ms, error_ratio) == share


@pytest.mark.parametrize("seed", [5, 6])
def test_shares_of_a_healthy_pipeline_are_shares(seed: int, stored) -> None:  # type: ignore[no-untyped-def]
    what = measure(stored(simulate(replace(scenario("pp"), seed=seed, fault=None, missing_tables=("collectives",)))))
    assert what is not None
    assert what.has_stages
    facts = what.to_json()
    for name in ("removed_by_worst_ranks_ratio", "removed_by_last_stage_ratio"):
        share: Any = facts[name]
        assert share is None or 0 <= share <= 1
    assert "changes from step to step" not in what_if_line(what)


def test_every_report_says_how_far_the_replay_is_off(stored) -> None:  # type: ignore[no-untyped-def]
    store = stored(simulate(replace(scenario("fsdp"), steps=45)))
    diagnosis = diagnose(store, {})
    assert diagnosis.what_if is not None
    for error, promised in ((0.043, True), (0.5, False)):
        told = replace(diagnosis, what_if=replace(diagnosis.what_if, error_ratio=error))
        assert told.what_if is not None
        line = what_if_line(told.what_if, told.findings)
        page = html.render(store, told, {}).decode()
        assert f"error {100 * error:.1f} %" in line
        assert line.replace("'", "&#39;") in page
        assert ("x faster" in line) == promised
        assert ("faster with evenly spread work" in page) == promised
