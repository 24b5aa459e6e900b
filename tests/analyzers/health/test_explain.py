"""Evidence and next step of the kinds of `health`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "xid",
            "memory",
            {"count": 2, "node": "n1", "message": "NVRM: Xid 48", "action": "reset the device"},
            "The driver of n1 reported it 2 times, class memory: NVRM: Xid 48.",
            "Reset the device. See `rankscope explain ",
        ),
        ("gpu_memory_errors", "remap_failed", {"uncorrected": 3, "corrected": None}, "uncorrected 3", "replaced"),
        (
            "gpu_throttled",
            "thermal",
            {"throttled_ratio": 0.5, "readings": 40, "hottest_celsius": 91.0, "clock_median_hertz": 1.2e9},
            "50 % of 40 readings",
            "air flow",
        ),
        (
            "link_errors",
            "nvlink",
            {"nvlink_errors": 1200, "pcie_replays": None},
            "1,200 errors on NVLinks",
            "nvidia-smi",
        ),
        (
            "host_pressure",
            "disk",
            {"disk_free_bytes": GIB, "disk_free_lowest_bytes": GIB // 2},
            "1 GiB are free now",
            "Free space on that disk",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
