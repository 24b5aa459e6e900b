"""Exit code of `benchmarks.accuracy.places`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.accuracy import places


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("no steps", 1)])
def test_a_loop_that_fails_is_no_success(problem: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(loop: str, names: object, options: object, folder: Path) -> tuple[list[places.Window], dict[str, object]]:
        return [], {"loop": loop, "problem": problem}

    monkeypatch.setattr(places, "run", run)
    monkeypatch.setattr(places, "ENDLESS", {})
    monkeypatch.setattr(sys, "argv", ["places", "--loops", "gan", "--faults", "none"])
    assert places.main() == code
