"""Sentences on the what-if, goodput and saves: one basis, no share above all, no contradiction of a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analyzers.finding import Finding
from analyzers.report.terminal.diagnosis_text import saves_line
from analyzers.report.wording.account_lines import claims_gain, what_if_line
from analyzers.whatif.what_if import WhatIf
from tests.sentences import assert_plain

WHAT = WhatIf(
    attempt=0, first_step=6, last_step=40, basis="calls", error_ratio=0.01, step_ms=269.0, ideal_step_ms=250.0,
    slowdown=269 / 250, by_rank={3: 1.05}, worst_ranks=(3,), worst_ranks_ratio=0.54, last_stage_ratio=None,
    lasting_slowdown=1.04,
)  # fmt: skip
INTERVAL = {
    "steps": 1742, "interval_s": 1500.0, "cost_s": 0.05, "mtbf_s": 2.3e7, "num_saves": 1, "num_failures": 0,
}  # fmt: skip


def slow(cause: str, kind: str = "straggler", **evidence: object) -> Finding:
    return Finding(
        analyzer=kind, kind=kind, severity="warning", status="fired", summary="Slow.", cause=cause, evidence=evidence
    )


def test_shares_are_of_the_gain_and_never_exceed_it() -> None:
    """Rank 3 removes 54 % of the whole slowdown, 10.26 ms, and balanced ranks would gain 10.35 ms for sure."""
    line = what_if_line(WHAT)
    assert "mean step 258.7 ms instead of 269 ms, steps 6 to 40, error 1.0 %" in line
    assert line.endswith("Balancing rank 3 alone gives 99 % of this gain.")
    whole = what_if_line(replace(WHAT, worst_ranks_ratio=1.0, last_stage_ratio=0.9))
    assert "gives 100 % of this gain. Balancing the last stage alone gives 100 %." in whole


def test_the_gain_of_a_finding_is_not_repeated() -> None:
    line = what_if_line(WHAT, [slow("compute", speedup_without_it_ratio=1.06)])
    assert line.startswith("Spreading the extra work over all ranks, instead of removing it as in the finding,")
    assert "steps 6 to 40, error 1.0 %" in line
    assert "of this gain" not in line
    assert "of this gain" in what_if_line(WHAT, [slow("compute")])


@pytest.mark.parametrize(
    ("finding", "scope"),
    [
        (slow("communication"), "Slow transfers are not part of this"),
        (slow("", "stage_imbalance"), "Differences between pipeline stages are not part of this"),
        (slow("compute"), "The straggler finding covers only its own steps."),
    ],
)
@pytest.mark.parametrize(
    "what",
    [
        replace(WHAT, lasting_slowdown=1.0),
        replace(WHAT, slowdown=1.0, lasting_slowdown=1.0),
        replace(WHAT, error_ratio=0.3),
    ],
)
def test_a_finding_limits_the_scope_of_a_claim_of_no_gain(what: WhatIf, finding: Finding, scope: str) -> None:
    line = what_if_line(what, [finding])
    assert scope in line
    assert "No rank" not in line
    assert scope not in what_if_line(what)
    assert_plain(line)


def test_a_stage_that_is_always_the_slowest_does_not_change_from_step_to_step() -> None:
    none = replace(WHAT, lasting_slowdown=1.0)
    assert "the slowest rank changes from step to step" in what_if_line(none)
    line = what_if_line(replace(none, has_stages=True), [slow("compute")])
    assert line == (
        "Balancing the ranks within each pipeline stage would gain less than 1 % (steps 6 to 40, error 1.0 %). "
        "The straggler finding covers only its own steps."
    )
    assert_plain(line)


def test_an_interval_that_is_longer_than_the_run_says_so() -> None:
    failed = {**INTERVAL, "num_failures": 3}
    assert "1742 steps (25 min), more than the 26 recorded. It loses the least time" in saves_line(failed, 26)
    assert saves_line({**INTERVAL, "num_failures": 0}, 26) == "", "an assumed rate says nothing of a short try"
    assert "recorded." not in saves_line(INTERVAL, 2_000)
    assert "one failure in 6,389 h" in saves_line(INTERVAL, None)


@pytest.mark.parametrize(
    ("what", "claimed"),
    [(WHAT, True), (replace(WHAT, slowdown=1.004, lasting_slowdown=None, error_ratio=0.0), False),
     (replace(WHAT, lasting_slowdown=1.004, error_ratio=0.0), False), (replace(WHAT, withheld="why"), False)],
)  # fmt: skip
def test_a_tile_claims_a_gain_only_where_the_sentence_does(what: WhatIf, claimed: bool) -> None:
    assert claims_gain(what) == claimed
    assert ("x faster" in what_if_line(what)) == claimed
