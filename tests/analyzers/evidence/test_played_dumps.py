"""Played dumps with a known culprit: nobody else is named where dumps are missing, wrapped or hold active calls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from tests.depth import tried
from tests.support.simulator.recorder_dumps import Job


@pytest.mark.parametrize("seed", range(tried(5, nightly=16)))
def test_only_the_rank_that_is_absent_is_named(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    size = rng.choice((4, 8))
    halves = {"1": ("dp_a", list(range(size // 2))), "2": ("dp_b", list(range(size // 2, size)))}
    job = Job(size, groups=halves if rng.random() < 0.6 else None, ring=rng.choice((2000, 12)))
    for _ in range(rng.choice((1, 5, 20))):
        job.steps(1)
        for group in list(job.groups)[1:]:
            job.steps(rng.choice((0, 1, 2)), group=group)
    culprit = rng.randrange(size)
    group = rng.choice([name for name, (_, members) in job.groups.items() if culprit in members])
    job.collective("all_reduce", group=group, ranks=[rank for rank in job.groups[group][1] if rank != culprit])
    if group != "0":  # the other half waits for this one's members
        job.collective("all_reduce", ranks=[rank for rank in range(size) if rank not in job.groups[group][1]])
    if rng.random() < 0.4:
        job.entries = [[entry for entry in entries if entry["state"] != "completed"] for entries in job.entries]
    kept = [rank for rank in range(size) if rank == culprit or rng.random() > 0.2]
    if len(kept) < 2:
        kept = list(range(size))
    found = diagnose_files([job.write(tmp_path / "dumps", ranks=kept, as_json=rng.random() < 0.3)])
    named = {rank for finding in found.fired for rank in finding.ranks}
    assert named <= {culprit}, [finding.summary for finding in found.fired]
