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
        (  # 64 ranks of a call are listed
            "hang",
            "device_stuck",
            {
                "waiting_ranks": list(range(100)),
                "waiting_calls": {"all_reduce #1": list(range(64)), "send #2 to rank 1": [97, 98, 99]},
            },
            "97 ranks waited in all_reduce #1, 3 ranks in other calls.",
            "`dmesg -T`",
        ),
        (
            "hang",
            "device_stuck",
            {
                "waiting_ranks": list(range(160)),
                "waiting_calls": {"all_reduce #1": list(range(64)), "all_reduce #2": list(range(80, 144))},
            },
            "At least 64 ranks waited in all_reduce #1, the rest in other calls.",
            "`dmesg -T`",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
