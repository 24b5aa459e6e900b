from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analyzers.compare.scaling import Scaling, ScalingError, scaling_of
from analyzers.compare.two_runs import Side
from tests.analyzers.memory_store import MemoryStore
from tests.e2e.launched import rankscope
from tests.factories import make_run

NS_PER_MS = 1_000_000


def side(ranks: int, step_ms: float, *, tokens: int, copies: int = 1, steps: int = 120, exposed: float = 0.0) -> Side:
    """A run whose steps take `step_ms`, give or take a tenth of a percent; `copies` ranks read the same tokens."""
    source = MemoryStore()
    rows: list[dict[str, Any]] = [
        {
            "attempt": 0, "rank": rank, "step": step, "start_ns": int(step * step_ms * NS_PER_MS), "committed": True,
            "duration_ns": int(step_ms * (1 + 0.001 * (step % 7 - 3)) * NS_PER_MS), "tokens": tokens * copies // ranks,
        }
        for rank in range(ranks)
        for step in range(1, steps + 1)
    ]  # fmt: skip
    source.add("steps", rows)
    source.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "tp": rank % copies} for rank in range(ranks)])
    facts = {"run_id": f"on-{ranks}", "num_ranks": ranks, "steps": steps, "tokens": tokens * steps, "mesh": {}}
    seconds = {"training": 1 - exposed, "communication": exposed, "straggler": 0.0, "bubble": 0.0, "data": 0.0}
    diagnosis: Any = SimpleNamespace(run=facts, goodput=SimpleNamespace(known_seconds=seconds))
    return Side(source=source, manifest={}, diagnosis=diagnosis)


def test_strong_scaling_with_a_serial_part() -> None:
    """Amdahl with a tenth that no rank shares: step time 100 (0.1 + 0.9 / n) ms."""
    runs = [side(n, 100 * (0.1 + 0.9 / n), tokens=8192, exposed=0.1 * (n > 1)) for n in (4, 1, 2)]
    found = scaling_of(runs)
    assert found.kind == "strong"
    assert [point.num_ranks for point in found.points] == [1, 2, 4]
    for point, n in zip(found.points[1:], (2, 4), strict=True):
        assert point.efficiency_ratio == pytest.approx(1 / (n * (0.1 + 0.9 / n)), rel=0.005)
        assert point.low <= point.efficiency_ratio <= point.high < 1
        assert point.serial_ratio == pytest.approx(0.1, abs=0.005)
        assert point.lost_to == "exposed communication"
    assert found.points[0].serial_ratio is None
    assert found.points[0].efficiency_ratio == 1


def test_weak_scaling_counts_what_a_rank_does() -> None:
    found = scaling_of([side(2, 50, tokens=2000), side(8, 62.5, tokens=8000)])
    assert found.kind == "weak"
    assert found.points[1].efficiency_ratio == pytest.approx(0.8, rel=0.005)
    assert found.points[1].speedup == pytest.approx(3.2, rel=0.005)
    assert found.points[1].tokens_per_s == pytest.approx(8000 / 0.0625, rel=0.01)


def test_tokens_that_several_ranks_share_count_once() -> None:
    """A tensor-parallel group reads the same tokens: four ranks of which two share are no more work."""
    found = scaling_of([side(1, 100, tokens=4096), side(4, 50, tokens=4096, copies=2)])
    assert found.kind == "strong"
    assert found.points[1].speedup == pytest.approx(2.0, rel=0.005)


def test_runs_that_do_other_work_are_reported_as_such() -> None:
    assert scaling_of([side(1, 100, tokens=1000), side(2, 100, tokens=5000)]).kind == "mixed"


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ScalingError, match="All runs have 2 ranks"):
        scaling_of([side(2, 100, tokens=1000), side(2, 90, tokens=1000)])
    nothing = side(4, 100, tokens=1000, steps=0)
    with pytest.raises(ScalingError, match="on-4 has no recorded steps"):
        scaling_of([side(2, 100, tokens=1000), nothing])


def test_the_command_on_several_runs(tmp_path: Path) -> None:
    folders = [str(make_run(tmp_path / str(n), ranks=n, steps=60).path) for n in (2, 4, 3)]
    done = rankscope("compare", *folders)
    assert done.returncode == 0, done.stderr
    assert "scaling (" in done.stdout
    told = json.loads(rankscope("compare", *folders, "--format", "json").stdout)["scaling"]
    assert [point["num_ranks"] for point in told["points"]] == [2, 3, 4]
    two = rankscope("compare", *folders[:2])
    assert "scaling (" in two.stdout
    assert "faster per token" in " ".join(two.stdout.split())
    for wrong in ((folders[0],), (*folders, "--html", str(tmp_path / "page.html"))):
        mistake = rankscope("compare", *wrong)
        assert (mistake.returncode, mistake.stderr.count("\n")) == (2, 1)


def test_types_are_valid_in_json() -> None:
    scaling: Scaling = scaling_of([side(1, 100, tokens=1000), side(2, 60, tokens=1000)])
    json.dumps(scaling.to_json(), allow_nan=False)
