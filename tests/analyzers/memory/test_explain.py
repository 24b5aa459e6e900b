"""Evidence and next step of the kinds of `memory`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "memory_growth",
            "leak",
            {"memory_first_bytes": GIB, "memory_last_bytes": 3 * GIB, "headroom_bytes": 2 * GIB},
            "from 1 GiB to 3 GiB",
            "kept between steps",
        ),
        (
            "memory_limit",
            "host",
            {"highest_bytes": 79 * GIB, "total_bytes": 80 * GIB, "newest_bytes": 60 * GIB},
            "at most 79 GiB of 80 GiB",
            "/dev/shm",
        ),
        (
            "memory_limit",
            "allocator",
            {"num_retries": 6, "num_seconds_with_retries": 3, "allocated_bytes": 70 * GIB, "reserved_bytes": 78 * GIB},
            "6 retries in 3 seconds",
            "expandable_segments",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
