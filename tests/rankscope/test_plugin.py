"""What an installed package brings: a kind of finding, a format of files, an action; a broken one is named."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from probes.tape.events import read_events
from probes.tape.format.writer import COMPLETE
from tests.factories import RankWriter, empty_run
from tests.forked import run_python

ROOT = Path(__file__).parents[2]
IN_DOCS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL | re.MULTILINE)
"""The module of a plug-in, whole."""
LIVE = """
import sys, time
from rankscope.import_names import claim_names
claim_names()
from pathlib import Path
from analyzers.live import LiveState, live_findings
from probes.tape.rundir import RunDir
from store import Store
with Store.open(RunDir.open(Path(sys.argv[1]))) as store:
    state = LiveState()
    found = [one for _ in range(10) for one in live_findings(store, state, time.time_ns())]
print([one.kind for one in found])
"""

HOOK = """
import sys
from rankscope.import_names import claim_names
claim_names()
from pathlib import Path
from analyzers.finding import Finding
from probes.tape.events import EventWriter
from watch.exporting.webhook import finding_hook
events = EventWriter(Path(sys.argv[1]), attempt=0, rank=-1)
with finding_hook({}, run_id="demo", events=events) as hook:
    hook.report([Finding(analyzer="slow_save", kind="slow_save", severity="warning", status="fired", ranks=(0,),
                         summary="Rank 0 saved for 5 s.")])
events.close()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example package installed by pip, and a second one that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    source = str(ROOT / "examples" / "plugin")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--target", str(folder), source],
        check=True, capture_output=True,
    )  # fmt: skip
    broken = folder / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    groups = ("analyzers", "readers", "hooks")
    lines = (f"[rankscope.{group}]\nbroken = module_that_is_not_there\n" for group in groups)
    (broken / "entry_points.txt").write_text("".join(lines))
    (module,) = IN_DOCS
    (folder / "slow_data.py").write_text(module)
    named = folder / "slow_data-1.0.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-data\nVersion: 1.0\n")
    (named / "entry_points.txt").write_text("[rankscope.analyzers]\nslow_data = slow_data\n")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = empty_run(tmp_path_factory.mktemp("plugin"), world_size=1)
    writer = RankWriter(run, rank=0)
    for step in range(1, 21):
        start_ns = step * 10**10
        save_ns = 5 * 10**9 if step == 7 else 0
        writer.append(
            "steps", COMPLETE, step=step, start_ns=start_ns, duration_ns=6 * 10**9, checkpoint_ns=save_ns, committed=1
        )
    writer.close()
    return run.path


def rankscope(site: Path, *arguments: str) -> str:
    environment = dict(os.environ, PYTHONPATH=f"{site}:{ROOT}")
    command = [*(["-m", "rankscope"] if arguments[0] != "-c" else []), *arguments]
    done = run_python(command, env=environment, cwd=run_folder(site))
    assert done.returncode == 0, done
    return done.stdout


def run_folder(site: Path) -> Path:
    return site.parent


def test_a_plug_in_finding_is_reported_like_a_built_in_kind(site: Path, run: Path) -> None:
    text = rankscope(site, "analyze", str(run))
    assert "Rank 0 stopped training for 5.0 s to save at step 7 (plug-in slow_save)." in text
    assert "SLOW SAVE" in text
    assert "The limit is 2 s; it took 5.0 s." in text
    report = json.loads(rankscope(site, "analyze", str(run), "--format", "json"))
    assert [one["id"] for one in report["findings"] if one["kind"] == "slow_save"] == ["slow_save-0-7-r0"]
    unjudged = [one["summary"] for one in report["findings"] if one["kind"] == "slow_data"]
    assert unjudged == ["Plug-in slow_data: Loading was not recorded."]
    broken = [one["summary"] for one in report["findings"] if "broken" in one["summary"]]
    assert broken, "a plug-in that cannot be loaded is not passed over"
    assert "module_that_is_not_there" in broken[0]


def test_the_module_of_the_docs_judges_a_run(site: Path, tmp_path: Path) -> None:
    slow = empty_run(tmp_path, world_size=1)
    writer = RankWriter(slow, rank=0)
    for step in range(1, 21):
        data_ns = 3 * 10**9 if step == 9 else 10**6
        writer.append("steps", COMPLETE, step=step, start_ns=step * 10**10, duration_ns=6 * 10**9, data_ns=data_ns,
                      committed=1)  # fmt: skip
    writer.close()
    report = json.loads(rankscope(site, "analyze", str(slow.path), "--format", "json"))
    (found,) = (one for one in report["findings"] if one["kind"] == "slow_data")
    assert found["summary"] == "Rank 0 waited 3.0 s for a batch at step 9 (plug-in slow_data)."
    assert found["id"] == "slow_data-9-r0"


def test_a_plug_in_finding_is_live_and_on_the_page(site: Path, run: Path) -> None:
    assert "slow_save" in rankscope(site, "-c", LIVE, str(run))
    page = run.parent / "report.html"
    rankscope(site, "report", str(run), "--html", str(page))
    assert "stopped training for 5.0 s" in page.read_text()


def test_a_format_of_the_team_is_read_and_judged(site: Path, tmp_path: Path) -> None:
    rows = [
        f"{rank},{step},0.5,{'nan' if (rank, step) == (2, 7) else 2.5}" for step in range(1, 10) for rank in range(4)
    ]
    (tmp_path / "steps.team").write_text("\n".join(["#team-steps 1", *rows]))
    (tmp_path / "cut.team").write_text("#team-steps 1\n1,2\n")
    report = json.loads(rankscope(site, "analyze", str(tmp_path), "--format", "json"))
    (found,) = [one for one in report["findings"] if one["kind"] == "non_finite"]
    assert (found["ranks"], found["first_step"]) == ([2], 7)
    problems = {one["path"]: one["problem"] for one in report["run"]["file_problems"]}
    assert problems["cut.team"].startswith("plug-in team_steps: ValueError: ")
    assert "(team_steps.py:" in problems["cut.team"]
    assert "module_that_is_not_there" in problems["broken"]


def test_a_slow_rank_in_a_format_of_the_team_is_found(site: Path, tmp_path: Path) -> None:
    dice = random.Random(1)
    rows = [
        f"{rank},{step},{dice.gauss(0.16 if rank == 2 else 0.1, 0.001):.5f},2.5"
        for step in range(120)
        for rank in range(4)
    ]
    (tmp_path / "steps.team").write_text("\n".join(["#team-steps 1", *rows]))
    report = json.loads(rankscope(site, "analyze", str(tmp_path), "--format", "json"))
    (found,) = [one for one in report["findings"] if one["status"] == "fired"]
    assert (found["kind"], found["ranks"], found["cause"]) == ("straggler", [2], "compute")
    assert found["evidence"]["factor_ratio"] == pytest.approx(1.6, abs=0.05)
    assert report["run"]["files_read"] == {"file of plug-in team_steps": 1}
    assert report["run"]["num_ranks"] == 4
    unjudged = " ".join(one["summary"] for one in report["findings"] if one["status"] == "insufficient_data")
    assert "were not recorded" in unjudged
    assert "to record them" not in unjudged
    assert "`attach`" not in unjudged
    (tmp_path / "steps.team").write_text("#team-steps 1\n")
    report = json.loads(rankscope(site, "analyze", str(tmp_path), "--format", "json"))
    assert report["verdict"] == "Nothing was judged: no line or row was read from the files."


def test_an_action_of_the_team_is_called_with_each_finding(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_PAGER", str(tmp_path / "pager"))
    rankscope(site, "-c", HOOK, str(tmp_path / "events.jsonl"))
    assert (tmp_path / "pager").read_text() == "demo: Rank 0 saved for 5 s.\n"
    events = read_events(tmp_path / "events.jsonl")[0]
    assert {(event["kind"], event["hook"]) for event in events} == {("hook_failed", "broken")}
    assert all("module_that_is_not_there" in event["reason"] for event in events)
