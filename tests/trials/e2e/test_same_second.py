"""`rankscope analyze` started in the second in which a run ends: right, or "Still reading"."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.durability.same_second import attempt


@pytest.mark.parametrize(("ending", "within_s"), [("kill", 0.1), ("exit", 0.5), ("hang_SIGINT", 0.1)])
def test_no_answer_is_wrong_or_retracted(tmp_path: Path, ending: str, within_s: float) -> None:
    result = attempt(ending, tmp_path, within_s)
    assert result.is_right, result
