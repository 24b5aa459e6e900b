"""SIGKILL of every process of a run at a random moment: nothing recorded is lost, and the death is explained."""

from __future__ import annotations

import random
from pathlib import Path

from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import TABLES
from probes.tape.rundir import RunDir
from store import Store
from tests.e2e.launched import rankscope, start
from tests.waiting import wait_for


def test_every_record_survives_and_the_death_is_explained(tmp_path: Path) -> None:
    run = start(tmp_path, "fsdp", settings=["train.steps=100000"])
    wait_for(run.is_saved, "a checkpoint", run)
    already, more = _steps(run.run), random.Random(4).randrange(5, 60)
    wait_for(lambda: _steps(run.run) >= already + more, "a random number of steps", run)
    run.kill_all()
    folder = run.run
    written = _records_on_tapes(folder)
    assert written["steps"] >= 4 * 10

    folder.store().unlink(missing_ok=True)
    rebuilt = rankscope("rebuild", str(folder.path))
    assert rebuilt.returncode == 0, rebuilt.stderr
    with Store.open(folder) as store:
        for table, count in written.items():
            assert store.rows(f"SELECT count(*) FROM {table}")[0][0] == count, table

    (lost,) = run.own_findings()
    assert lost["kind"] == "rank_lost"
    assert (lost["cause"], lost["ranks"]) == ("killed_all", [])
    assert "all 4 ranks stopped" in lost["summary"]
    text = rankscope("analyze", str(folder.path)).stdout
    assert "Verdict" in text
    assert "killed" in text


def _steps(folder: RunDir) -> int:
    return sum(len(read_segment(path).records) for path in segment_paths(folder.rank_dir(0, 0), "steps"))


def _records_on_tapes(folder: RunDir) -> dict[str, int]:
    """Records by table, counted on the tapes themselves."""
    counts = {}
    for table in (table.name for table in TABLES.values() if table.source == "tape" and table.name != "health"):
        paths = [path for _, _, directory in folder.rank_dirs() for path in segment_paths(directory, table)]
        counts[table] = sum(len(read_segment(path).records) for path in paths)
    return counts
