"""Processor time of opening a store."""

from __future__ import annotations

import time
from pathlib import Path

from store import Store
from tests.factories import make_run


def test_the_store_opens_quickly(tmp_path: Path) -> None:
    """A run of the demo's size, caught up already: 0.06 s were measured, the target is 0.3 s, of CPU time here."""
    run = make_run(tmp_path, steps=150)
    with Store.open(run):
        pass
    times = []
    for _ in range(5):
        start = time.process_time()
        with Store.open(run) as store:
            store.rows("SELECT count(*) FROM steps")
        times.append(time.process_time() - start)
    assert min(times) < 0.3
