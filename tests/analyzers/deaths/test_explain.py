"""Evidence and next step of the kinds of `deaths`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "rank_lost",
            "exception",
            {
                "error_type": "Empty",
                "raised_at": "train.py:31 in next",
                "thread_errors": [{"rank": 1, "thread": "prefetch", "at": "train.py:25 in fill"}],
            },
            "Empty (train.py:31 in next)",
            "First check train.py:25 in fill, where thread prefetch ended. Check train.py:31 in next.",
        ),
        ("excluded", "device", {"num_failures": 3}, "3 failures there", "dcgmi diag"),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
