"""Whom a verdict names on played logs: nobody but the true culprit (python -m benchmarks.incidents.played for more)."""

from __future__ import annotations

import pytest

from benchmarks.incidents.played import findings_of, play

FOUND = (2, 12, 15, 31, 76, 96, 111, 144, 513, 568, 579, 663)
"""Seeds that named ranks which only suffered, or that nobody had a log of."""


@pytest.mark.parametrize("seed", FOUND)
def test_only_the_culprit_is_named(seed: int) -> None:
    job = play(seed)
    named = {rank for finding in findings_of(job) for rank in finding.ranks}
    assert named <= job.culprits, job.how


def test_a_culprit_is_named_at_all() -> None:
    job = play(4)
    assert {rank for finding in findings_of(job) for rank in finding.ranks} == job.culprits
