"""Ranks that are slow between the phases of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.account.timings import GAPS, OWN_PHASES, load_timings
from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.stragglers.analyze import stragglers
from store import Store
from tests.analyzers.explained import explained
from tests.factories import make_run


def judged(source: Source) -> list[Finding]:
    return explained(stragglers(source, Scope()))


@pytest.mark.parametrize("gap", GAPS)
def test_work_between_phases_is_judged_like_work_in_a_phase(tmp_path: Path, gap: str) -> None:
    gaps_ms = dict.fromkeys(GAPS, 5.0)
    run = make_run(tmp_path, ranks=4, steps=60, gaps_ms=gaps_ms, slow={2: 5.0}, phase=gap, slow_from=30)
    with Store.open(run) as store:
        (found,) = judged(store)
    assert (found.ranks, found.evidence["place"]) == ((2,), gap)
    assert abs((found.first_step or 0) - 30) <= 2
    assert found.evidence["excess_ms"] == pytest.approx(20, abs=2)
    words = {
        "before_forward": "before the forward pass", "forward_to_backward": "between forward and backward",
        "backward_to_optimizer": "between backward and the optimizer", "after_optimizer": "after the optimizer",
    }  # fmt: skip
    assert f"per step {words[gap]} (" in found.summary


@pytest.mark.parametrize(
    ("gap", "column", "status"),
    [
        ("after_optimizer", "data_ns AS data_ns", "advice"),
        ("after_optimizer", "CAST(0 AS BIGINT) AS data_ns", "fired"),
        ("after_optimizer", "CAST(if(rank = 0 AND step >= 30, 20e6, 0) AS BIGINT) AS gc_ns", "fired"),
        ("backward_to_optimizer", "data_ns AS data_ns", "fired"),
    ],
    ids=["it may log", "it may make a batch", "its collector runs", "nobody logs there"],
)
def test_what_rank_0_does_after_the_optimizer_may_be_its_duty(
    tmp_path: Path, gap: str, column: str, status: str
) -> None:
    run = make_run(
        tmp_path, ranks=4, steps=60, gaps_ms=dict.fromkeys(GAPS, 5.0), slow={0: 5.0}, phase=gap, slow_from=30
    )
    with Store.open(run) as store, store.session(steps=f"SELECT * REPLACE ({column}) FROM steps") as session:
        (found,) = judged(session)
        live = stragglers(session, Scope(now_ns=1))
    assert (found.status, found.ranks, found.evidence["place"]) == (status, (0,), gap)
    assert found.evidence["excess_ms"] == pytest.approx(20, abs=2)
    assert [one.status for one in live if one.ranks] == ([] if status == "advice" else ["fired"])
    assert ("which may log or evaluate for them" in next_step(found)) == (status == "advice")


def test_gaps_of_a_rank_on_a_gpu_are_not_own_work(tmp_path: Path) -> None:
    """There the host waits for its device, and so for others, wherever it reads a value back."""
    devices = {rank: {"device": f"cuda:{rank}"} for rank in range(4)}
    run = make_run(
        tmp_path, steps=60, gaps_ms={"after_optimizer": 5.0}, slow={2: 5.0}, phase="after_optimizer",
        identities=devices,
    )  # fmt: skip
    with Store.open(run) as store:
        timings = load_timings(store, 0)
        assert timings is not None
        assert set(timings.own) == set(OWN_PHASES)
        (found,) = judged(store)
    assert found.status == "insufficient_data", "not compared is not healthy"
    assert "GPU" in found.summary


def test_without_gaps_on_the_tapes_phases_are_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=60, slow={2: 1.5})
    with Store.open(run) as store, store.session(
        steps="SELECT * REPLACE (CAST(NULL AS BIGINT) AS before_forward_ns) FROM steps"
    ) as session:  # fmt: skip
        timings = load_timings(session, 0)
        assert timings is not None
        assert set(timings.own) == set(OWN_PHASES)
        (found,) = judged(session)
    assert found.ranks == (2,)
