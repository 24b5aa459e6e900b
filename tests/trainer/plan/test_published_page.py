"""docs/planning.md has the table of published trainings that the benchmark prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.accuracy.published_plans import markdown

PAGE = Path(__file__).parents[3] / "docs" / "planning.md"


def test_the_table_is_what_the_command_prints() -> None:
    assert markdown() in PAGE.read_text(encoding="utf-8")
