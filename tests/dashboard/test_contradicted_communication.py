"""Exposed communication that the profiler's traces contradict is not judged on any page that has a figure of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.opened import open_page, shown
from tests.support.captured_gpu import with_captures

SENTENCE = "Exposed communication was not judged: a profiler trace contradicts it"


@pytest.mark.parametrize("page", ["goodput", "collectives"])
def test_the_page_says_so_at_the_figure(page: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    run = with_captures("stamped_fsdp2_none", runs, factor=3.0)
    app = open_page(runs, page, run=run.path.name)
    assert not app.exception
    assert SENTENCE in shown(app)
    assert "Exposed: not judged" in shown(app).replace("\n", " ") or page == "goodput"
