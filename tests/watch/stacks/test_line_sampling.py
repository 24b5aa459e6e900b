"""The line that only the slow rank stands in, from real processes that sleep in different places."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from analyzers.finding import Finding
from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from tests.waiting import wait_for
from watch.stacks.line_sampling import LineSampler, distinctive_line

ROOT = Path(__file__).parents[3]
RANK = """
import sys, time
from pathlib import Path
from probes.tape.rundir import RunDir
from probes.tape.stack_file import register

register(RunDir(Path(sys.argv[1])), 0, int(sys.argv[2]))
def slow_tokenizer():
    time.sleep(0.5)
def waits_for_the_other():
    time.sleep(0.5 if sys.argv[2] == "0" else 0.005)
print("there", flush=True)
while True:
    if sys.argv[2] == "1":
        slow_tokenizer()
    waits_for_the_other()
"""


def straggler(**more: object) -> Finding:
    return Finding(analyzer="straggler", kind="straggler", severity="warning", status="fired", summary="Slow.",
                   ranks=(1,), attempt=0, cause="host", **more)  # type: ignore[arg-type]  # fmt: skip


def test_the_line_of_the_slow_rank_is_found_in_real_processes(tmp_path: Path) -> None:
    run, _ = RunDir.adopt(tmp_path / "run")
    folder = run.node_dir(0)
    folder.mkdir(parents=True)
    events = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(run.path), str(rank)], cwd=ROOT, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"there\n"
        pids = {number: rank.pid for number, rank in enumerate(ranks)}
        off = LineSampler(run, events, enabled=False)
        off.sample(straggler(), pids)
        lines = LineSampler(run, events)
        lines.sample(straggler(), pids)

        def found() -> list[dict[str, object]]:
            return [e for e in read_events(events.path)[0] if e["kind"] == event_kinds.SLOW_LINE]

        (event,) = wait_for(found, "the line")
        assert str(event["line"]).endswith("slow_tokenizer")
        assert (event["slow_rank"], event["peer_rank"], event["num_samples"]) == (1, 0, 20)
        assert float(str(event["share_ratio"])) > 0.5 > float(str(event["peer_share_ratio"]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        events.close()


def test_a_line_in_which_both_stand_is_not_the_cause() -> None:
    assert distinctive_line(Counter({"a.py:1 wait": 20}), Counter({"a.py:1 wait": 19, "b.py:2 f": 1})) is None
    assert distinctive_line(Counter({"a.py:1 wait": 3}), Counter({"b.py:2 f": 20})) is None, "too few samples"
    line = distinctive_line(Counter({"a.py:1 wait": 10, "c.py:3 load": 10}), Counter({"a.py:1 wait": 20}))
    assert line == ("c.py:3 load", 0.5, 0.0)
