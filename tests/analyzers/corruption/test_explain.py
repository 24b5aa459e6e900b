"""Evidence and next step of the kinds of `corruption`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "gradient_corrupted",
            "gradient",
            {"peak": 1e9, "peak_again": 0.5, "sigmas": 300.0, "count_on_device": 2},
            "0.5 when recomputed from the same state and batch (2 times on this device).",
            "Drain and test this device",
        ),
        (
            "replica_mismatch",
            "parameter",
            {"replica_groups": ["dp"], "num_replicas": 4, "num_tensors": 1, "last_healthy_step": 20},
            "Bits of 1 tensor differ between 4 replicas, and the last check that agreed was at step 20.",
            "replace it",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
