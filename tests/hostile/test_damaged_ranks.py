"""A run in which every rank but the first two is spoiled in another way (F48): one report, which says what is missing.

One case a rank, so that hundred cases cost one store. Some are run again in a child with little memory.
"""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.report.html.diagnosis_page import render as as_html
from analyzers.report.json import to_json
from analyzers.report.markdown import to_markdown
from analyzers.report.terminal.diagnosis_text import render
from probes.tape.rundir import RunDir
from store import Store
from tests.factories import make_run
from tests.hostile.rank_damage import CASES, SECRET_TEXT

GOOD = 2
STEPS = 3
LIMIT_BYTES = 3 << 30
RANKS = {name: rank for rank, name in enumerate(CASES, start=GOOD)}


@dataclass(frozen=True)
class Report:
    run: RunDir
    diagnosis: Diagnosis
    problems: dict[str, str]
    steps: dict[int, int]
    texts: str
    shown: str
    """Text, Markdown and HTML, as people see them."""
    seconds: float


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = make_run(tmp_path_factory.mktemp("spoiled"), ranks=GOOD + len(CASES), steps=STEPS)
    for name, (spoil, _) in CASES.items():
        spoil(run.rank_dir(0, RANKS[name]))
    return run


@pytest.fixture(scope="module")
def report(spoiled: RunDir) -> Iterator[Report]:
    start = time.process_time()
    with Store.open(spoiled) as store:
        diagnosis = diagnose(store, spoiled.manifest(), stacks_dir=spoiled.stacks)
        steps: dict[int, int] = dict(store.rows("SELECT rank, count(*) FROM steps GROUP BY rank"))
        names = store.rows("SELECT DISTINCT op, process_group, caller FROM collectives") + store.rows(
            "SELECT kind, detail FROM events"
        )
        html = as_html(store, diagnosis, spoiled.manifest()).decode()
    screen = io.StringIO()
    render(diagnosis, Console(file=screen, width=200, no_color=True, legacy_windows=False))
    text = json.dumps(to_json(diagnosis), allow_nan=False)
    problems: dict[str, str] = {}
    for found in diagnosis.run["file_problems"]:
        problems.setdefault(found["path"], found["problem"])
    return Report(
        run=spoiled, diagnosis=diagnosis, problems=problems, steps=steps, seconds=time.process_time() - start,
        texts=screen.getvalue() + text + repr(names) + html,
        shown=screen.getvalue() + to_markdown(diagnosis, spoiled.manifest()) + html,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_with_a_rank_is_told(report: Report, name: str) -> None:
    rank, words = RANKS[name], CASES[name][1]
    own = {path: problem for path, problem in report.problems.items() if f"rank-{rank:05d}" in path}
    if words:
        assert any(words in problem for problem in own.values()), own
    else:
        assert len(own) <= 1 or all("tape" in path for path in own), own


def test_the_good_ranks_are_whole(report: Report) -> None:
    assert [report.steps[rank] for rank in range(GOOD)] == [STEPS] * GOOD
    events_alone = [rank for name, rank in RANKS.items() if "event" in name and "missing" not in name]
    assert all(report.steps.get(rank) == STEPS for rank in events_alone)


def test_nothing_outside_was_read_and_no_analyzer_failed(report: Report) -> None:
    assert SECRET_TEXT not in report.texts
    failed = [finding.summary for finding in report.diagnosis.findings if finding.advice == "analyzer-failed"]
    assert not failed
    assert report.seconds < 60.0


def test_no_text_of_the_run_is_obeyed(report: Report) -> None:
    assert "\x1b" not in report.shown
    assert "<script>alert" not in report.shown
    assert "<img src=x" not in report.shown


def test_there_are_more_than_eighty_cases() -> None:
    assert len(CASES) > 80


def test_in_a_child_with_little_memory(spoiled: RunDir, tmp_path: Path) -> None:
    """Everything again from the tapes, under a limit of addresses: an allocation that is never touched fails, too."""
    program = (
        "import re, sys\nfrom pathlib import Path\nfrom probes.tape.rundir import RunDir\n"
        "from store.ingest.ingest import Ingester\n"
        "with Ingester(RunDir(Path(sys.argv[1])), store_path=Path(sys.argv[2])) as ingester:\n"
        "    rows = ingester.catch_up()['steps']\n"
        "    print(rows, re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])\n"
    )  # not ru_maxrss, which begins with what the process had that forked this one
    done = subprocess.run(
        [sys.executable, "-c", program, str(spoiled.path), str(tmp_path / "fresh.duckdb")],
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, kib = map(int, done.stdout.split())
    assert rows >= STEPS * GOOD
    assert kib < 700 << 10
