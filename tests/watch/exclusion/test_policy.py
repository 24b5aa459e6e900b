"""Which stragglers may be left out of a run, and which not."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.finding import Finding
from probes.settings.sections import RecoverySettings
from watch.exclusion.policy import reason_to_keep

SETTINGS = RecoverySettings(on_straggler="exclude")


def straggler(cause: str = "compute", **evidence: Any) -> Finding:
    known = {"pattern": "since", "speedup_without_it_ratio": 1.5, **evidence}
    return Finding(
        analyzer="straggler", kind="straggler", severity="warning", status="fired", summary="Slow.", ranks=(1,),
        cause=cause, evidence=known, attempt=0,
    )  # fmt: skip


@pytest.mark.parametrize("cause", ["compute", "gpu_clock"])
def test_a_slow_device_may_be_left_out(cause: str) -> None:
    assert reason_to_keep(straggler(cause), SETTINGS) == ""


@pytest.mark.parametrize(
    ("finding", "reason"),
    [
        (straggler("data"), "waits for data"),
        (straggler("host"), "host delays it"),
        (straggler("sequence_length"), "longer sequences"),
        (straggler("communication"), "two ends"),
        (straggler("of_a_plugin"), "of_a_plugin"),
        (straggler(place="after_optimizer"), "between phases"),
        (straggler(compared_with="its own past"), "same work"),
        (straggler(pattern="pauses"), "pauses"),
        (straggler(pattern="rotating"), "rotating"),
        (straggler(speedup_without_it_ratio=1.1), "1.10x"),
        (straggler(speedup_without_it_ratio=None), "gain is unknown"),
        (straggler(whatif_withheld="too few calls"), "gain is unknown"),
    ],
)
def test_ranks_that_another_device_would_not_help_are_kept(finding: Finding, reason: str) -> None:
    assert reason in reason_to_keep(finding, SETTINGS)


def test_compute_of_ranks_with_different_experts_follows_the_tokens() -> None:
    assert "experts" in reason_to_keep(straggler(), SETTINGS, has_experts=True)
    assert reason_to_keep(straggler("gpu_clock"), SETTINGS, has_experts=True) == ""
