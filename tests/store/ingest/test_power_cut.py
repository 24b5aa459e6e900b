"""A disk that loses its power: synced records survive, the store is never ahead of its events, and no row is lost."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cost.loop_disk import LoopDisk, has_loop_disks
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from store import Ingester, Store, StoreError, rebuild

WRITER = """
import sys, time
from pathlib import Path
from store import Ingester
from probes.tape.rundir import RunDir
from tests.factories import RankWriter, empty_run
from probes.tape.format.writer import COMPLETE, OPEN
from watch.records.tape_sync import TapeSync

run = empty_run(Path(sys.argv[1]))
writer = RankWriter(run, 0)
for step in range(3000):
    writer.append("steps", COMPLETE, step=step, start_ns=writer.now_ns)
TapeSync(run).sync()
for step in range(3000, 3100):
    writer.append("steps", COMPLETE, step=step, start_ns=writer.now_ns)
for seq in range(3):
    writer.append("collectives", OPEN, step=3100, seq=seq, op="all_reduce", issue_ns=writer.now_ns)
for step in range(50):
    writer.events.write_any("note", step=step, text="before")
with Ingester(run) as ingester:  # as watch: the store has all that was written
    ingester.tick()
print(run.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def disk() -> Iterator[LoopDisk]:
    with tempfile.TemporaryDirectory() as folder:
        if not has_loop_disks(Path(folder) / "probe"):
            pytest.skip("images cannot be mounted here")
        with LoopDisk(Path(folder), size_bytes=64 << 20) as found:
            yield found


def test_a_power_cut_costs_what_was_not_synced_and_no_row_of_the_store(disk: LoopDisk) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(disk.path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        path = Path(child.stdout.readline().strip())
        disk.cut_power()
        child.kill()
    disk.power_on()
    run = RunDir.open(path)
    events = EventWriter(run.rank_dir(0, 0) / "events.jsonl", attempt=0, rank=0)
    for step in range(20):
        events.write_any("note", step=step, text="after")
    events.close()
    with Ingester(run) as ingester:
        ingester.tick()
    with Store.open(run, catch_up=False) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(3100,)], "the store was committed to the disk"
        notes = store.rows("SELECT detail->>'text', count(*) FROM events WHERE kind = 'note' GROUP BY ALL ORDER BY 1")
        assert notes == [("after", 20), ("before", 50)], "none twice, and none of the new ones skipped"
        assert store.rows("SELECT count(*) FROM collectives WHERE end_ns IS NULL") == [(3,)], "what was in flight"
        problems = {path.rpartition("/")[2]: text for path, text in store.rows("SELECT * FROM ingest_problems")}
        lost = [name for name, text in problems.items() if text == "its last records were lost; the store has them"]
        assert [name for name in lost if name.startswith("steps.")] == [max(lost)], problems
    with pytest.raises(StoreError, match="rows that the tapes no longer have"):
        rebuild(run)
    result = rebuild(run, force=True)
    assert 3000 <= result.rows["steps"] < 3100, "what was synced is on the tape, what came later is not"
