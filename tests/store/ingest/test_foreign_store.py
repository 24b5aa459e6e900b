"""A store of another run in the folder, as a wrong copy leaves it: it is set aside, and its figures are not shown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from store import Ingester, Store
from tests.factories import make_run


def stored(folder: Path, *, steps: int, pid: int) -> RunDir:
    identities = {rank: {"pid": pid + rank, "start_ticks": 100 + rank} for rank in range(2)}
    run = make_run(folder, ranks=2, steps=steps, identities=identities)
    with Ingester(run) as ingester:
        ingester.catch_up()
    return run


@pytest.mark.parametrize("num_steps", [10, 30])
def test_the_figures_are_those_of_the_tapes(tmp_path: Path, num_steps: int) -> None:
    run, other = stored(tmp_path / "a", steps=20, pid=1000), stored(tmp_path / "b", steps=num_steps, pid=2000)
    shutil.copy(other.store(), run.store())
    for _ in range(2):
        with Store.open(run) as store:
            assert store.rows("SELECT count(*) FROM steps") == [(40,)]
            ((path, problem),) = store.rows("SELECT path, problem FROM ingest_problems")
        assert path == "telemetry.duckdb"
        assert problem.startswith("has the records of another run; set aside as telemetry.duckdb.quarantine")


def test_a_store_that_lacks_a_later_attempt_is_this_runs(tmp_path: Path) -> None:
    run = stored(tmp_path, steps=20, pid=1000)
    again = {rank: {"pid": 3000 + rank, "start_ticks": 900 + rank} for rank in range(2)}
    make_run(tmp_path, ranks=2, steps=5, run=run, attempt=1, first_step=21, identities=again)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(50,)]
        assert store.rows("SELECT * FROM ingest_problems") == []
