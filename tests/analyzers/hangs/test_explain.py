"""Evidence and next step of the kinds of `hangs`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "node_silent",
            "silent",
            {"silent_s": 12.0, "reports_again": False},
            "for 12 s, and nothing has arrived since",
            "Ping the node",
        ),
        (
            "hang",
            "device_stuck",
            {
                "waiting_ranks": [8, 10],
                "waiting_calls": {"send #0 to rank 1": [9], "all_to_all #5 (group ep:8-15)": [8, 10]},
            },
            "2 ranks waited in all_to_all #5 (group ep:8-15).",
            "`dmesg -T`",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
