"""No process of a run outlives its test, however the test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.launched import STARTED


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    yield
    while STARTED:
        run = STARTED.pop()
        if run.process.poll() is None:
            run.kill_all()
        if run.process.stdout is not None:
            run.process.stdout.close()
