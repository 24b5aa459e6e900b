"""Which stragglers may be left out of a run, and which not."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.finding import Finding
from watch.exclusion.policy import ExclusionPolicy, exclusion_policy, reason_to_keep

POLICY = ExclusionPolicy(on_straggler="exclude")


def straggler(cause: str = "compute", **evidence: Any) -> Finding:
    known = {"pattern": "since", "speedup_without_it_ratio": 1.5, **evidence}
    return Finding(
        analyzer="straggler", kind="straggler", severity="warning", status="fired", summary="Slow.", ranks=(1,),
        cause=cause, evidence=known, attempt=0,
    )  # fmt: skip


@pytest.mark.parametrize("cause", ["compute", "gpu_clock"])
def test_a_slow_device_may_be_left_out(cause: str) -> None:
    assert reason_to_keep(straggler(cause), POLICY) == ""


@pytest.mark.parametrize(
    ("finding", "reason"),
    [
        (straggler("data"), "waits for its data"),
        (straggler("host"), "host keeps it"),
        (straggler("sequence_length"), "longer sequences"),
        (straggler("communication"), "two ends"),
        (straggler("of_a_plugin"), "of_a_plugin"),
        (straggler(place="after_optimizer"), "between phases"),
        (straggler(compared_with="its own past"), "same work"),
        (straggler(pattern="pauses"), "pauses"),
        (straggler(pattern="rotating"), "rotating"),
        (straggler(speedup_without_it_ratio=1.1), "1.10x"),
        (straggler(speedup_without_it_ratio=None), "not known"),
        (straggler(whatif_withheld="too few calls"), "not known"),
    ],
)
def test_what_another_device_would_not_change_stays(finding: Finding, reason: str) -> None:
    assert reason in reason_to_keep(finding, POLICY)


def test_compute_of_ranks_with_different_experts_follows_the_tokens() -> None:
    assert "experts" in reason_to_keep(straggler(), POLICY, has_experts=True)
    assert reason_to_keep(straggler("gpu_clock"), POLICY, has_experts=True) == ""


def test_settings_of_a_run_and_of_one_without_any() -> None:
    recovery = {"enabled": True, "on_straggler": "replace", "straggler_after_s": 5.0, "exclusion_dry_run": True}
    policy = exclusion_policy({"config": {"recovery": recovery}})
    assert (policy.on_straggler, policy.straggler_after_s, policy.dry_run) == ("replace", 5.0, True)
    for manifest in ({}, {"config": {"recovery": {**recovery, "enabled": False}}}, {"config": {"recovery": 3}}):
        assert exclusion_policy(manifest).on_straggler == "report"
    damaged = {"config": {"recovery": {"enabled": True, "on_straggler": "delete", "straggler_after_s": "no"}}}
    assert exclusion_policy(damaged) == ExclusionPolicy()
