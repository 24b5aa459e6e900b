"""Plug-ins cannot hurt: of many bad ones each is named, and no finding of ours is missing anywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from probes.tape.redaction.printable import escaped
from tests.factories import make_run
from tests.forked import run_python
from tests.rankscope.bad_plugins import BAD, install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
# One process, as a notebook or a service: the report, both pages, the bundle, the agent's tool, and two live rounds.
EVERYWHERE = """
import json, sys, time
import rankscope
from rankscope.cli import app
from pathlib import Path

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
run = rankscope.open(folder)
out.joinpath("report.json").write_text(json.dumps(run.report(), allow_nan=False))
def command(*arguments):
    app([*map(str, arguments)], standalone_mode=False)
command("report", folder, "--html", out / "page.html", "--markdown", out / "page.md")
command("share", folder, "--out", out / "bundle.tar.gz")
from rankscope.mcp_server.tools import Tools
from store.runs_folder import RunsFolder
out.joinpath("mcp.json").write_text(json.dumps(Tools(RunsFolder(folder.parent)).verdict(folder.name)))
from analyzers.finding import Finding
from dashboard.views.findings import _ById, load_evidence
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from store import Store
from watch.exporting.exports import Exports
from watch.live import LiveJudge
from watch.plugins.loop import PluginLoop, QueriedStore

opened = RunDir.open(folder)
with Store.open(opened) as store:
    figures = {one.kind: load_evidence(store, _ById(one))["drawings"] for one in run.findings}
titles = {kind: [title for title, _ in found] for kind, found in figures.items()}
out.joinpath("drawn.json").write_text(json.dumps(titles))

class Tapes:
    def recorded_now_ns(self): return time.time_ns()
class NoExports:
    def report(self, findings): pass
events = EventWriter(out / "events.jsonl", attempt=0, rank=-1)
judge = LiveJudge(opened.manifest(), events, NoExports())
loop = PluginLoop(lambda: Store.open(opened, catch_up=False, threads=1), Tapes(), judge)
with Store.open(opened) as store:
    judge.report([one for _ in range(6) for one in judge.record_findings(store, time.time_ns())])
for _ in range(2):
    loop.tick()
events.close()
"""

# The script of the real dashboard: two pages, and the finding whose figure raises.
PAGES = """
import json, sys
from pathlib import Path
from tests.dashboard.opened import open_page, shown
import rankscope

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
(drawn,) = (one["id"] for one in json.loads((out / "report.json").read_text())["findings"] if one["kind"] == "figure")
asked = {"overview": {}, "findings": {}, "figure": {"finding": drawn}}
pages = {}
for name, address in asked.items():
    app = open_page(folder.parent, "findings" if address else name, run=folder.name, **address)
    pages[name] = {"shown": shown(app), "exceptions": [str(one.value) for one in app.exception]}
out.joinpath("pages.json").write_text(json.dumps(pages))
"""

# A run that ends while a plug-in hangs, which may take longer than the test: nothing waits for it.
ENDING = """
import sys, time
from rankscope.import_names import claim_names
claim_names()
from pathlib import Path
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import RunDir
from store import Store
from watch.live import LiveJudge
from watch.plugins.loop import PluginLoop

opened, out = RunDir.open(Path(sys.argv[1])), Path(sys.argv[2])
class Tapes:
    def recorded_now_ns(self): return time.time_ns()
class NoExports:
    def report(self, findings): pass
events = EventWriter(out / "events.jsonl", attempt=0, rank=-1)
judge = LiveJudge(opened.manifest(), events, NoExports())
with Store.open(opened):
    pass
loop = PluginLoop(lambda: Store.open(opened, catch_up=False, threads=1), Tapes(), judge)
with loop.running():
    while not (out / "asked").exists():
        time.sleep(0.05)
loop.finish()
events.close()
print([(event["kind"], event.get("reason")) for event in read_events(events.path)[0]])
"""


def python(site: Path | None, *arguments: str, limit_s: str = "10") -> str:
    environment = dict(os.environ, PYTHONPATH=f"{site}:{ROOT}" if site else str(ROOT), RANKSCOPE_PLUGIN_LIMIT_S=limit_s)
    done = run_python(arguments, env=environment, timeout_s=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def ours(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Findings of ours; the bundle and the pages were made of the same diagnosis."""
    return [one for one in report["findings"] if one["kind"] not in BAD and "plugin" not in one["evidence"]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{where: what a user sees there} with all of them installed; `alone`: the report without them."""
    folder = tmp_path_factory.mktemp("bad")
    site = install(folder / "site")
    run = make_run(folder, ranks=4, steps=60, slow={2: 2.0}).path
    alone = json.loads(python(None, "-m", "rankscope", "analyze", str(run), "--format", "json"))
    python(site, "-c", EVERYWHERE, str(run), str(folder))
    python(site, "-c", PAGES, str(run), str(folder))
    (folder / "rows.txt").write_text("#bad-rows\n")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {
        "alone": alone,
        "json": json.loads((folder / "report.json").read_text()),
        "page": (folder / "page.html").read_text(),
        "markdown": (folder / "page.md").read_text(),
        "mcp": json.loads((folder / "mcp.json").read_text()),
        "drawn": json.loads((folder / "drawn.json").read_text()),
        "pages": json.loads((folder / "pages.json").read_text()),
        "bundle": (folder / "bundle.tar.gz").stat().st_size,
        "live": [one["reason"] for one in events if one["kind"] == "analyzer_failed"],
        "live_findings": {one["finding_kind"] for one in events if one["kind"] == "finding"},
        "files": python(site, "-m", "rankscope", "analyze", str(folder / "rows.txt")),
    }


def test_no_finding_of_ours_is_missing_or_changed(seen: dict[str, Any]) -> None:
    assert ours(seen["json"]) == ours(seen["alone"])
    assert "Rank 2" in seen["json"]["verdict"]
    assert "Number 0 (plug-in million, 19 more)." in seen["json"]["verdict"]
    assert "straggler" in {one["kind"] for one in seen["mcp"]["findings"]}
    assert "straggler" in seen["live_findings"]
    assert "STRAGGLER" in seen["page"].upper()
    assert seen["bundle"] > 1000


@pytest.mark.parametrize("name", [name for name, bad in BAD.items() if name != "row" and not bad.only_live])
def test_each_plug_in_is_named_with_its_reason(seen: dict[str, Any], name: str) -> None:
    bad = BAD[name]
    told = [one["summary"] for one in seen["json"]["findings"] if one["evidence"].get("plugin") == name]
    if name == "figure":
        told = [f"Plug-in figure: {title}" for title in [seen["page"]]]
        assert seen["drawn"]["figure"] == ["The figure for plug-in figure could not be drawn"]
    assert any(bad.reason in text for text in told), told
    if name != "figure":
        assert any(text.startswith(f"Plug-in {name}: ") for text in seen["mcp"]["not_judged"])
        assert f"Plug-in {escaped(name)}: " in seen["markdown"]
        assert any(bad.reason in reason for reason in seen["live"]), "\n".join(seen["live"])
    summaries = [one["summary"] for one in seen["json"]["findings"] if one["kind"] == name]
    assert (f"{bad.keeps.rstrip('.')} (plug-in {name})." in summaries) if bad.keeps else not summaries


def test_pages_of_the_dashboard_have_our_finding_and_name_each_plugin(seen: dict[str, Any]) -> None:
    """The run has four cards on its overview, and plug-ins have twenty-two critical findings to fill them with."""
    pages = seen["pages"]
    assert {name: page["exceptions"] for name, page in pages.items()} == {name: [] for name in pages}
    for name in ("overview", "findings"):
        assert "Rank 2 was slow from the first step" in pages[name]["shown"]
    for name, bad in BAD.items():
        if name not in ("row", "figure") and not bad.only_live:
            assert f"Plug-in {escaped(name)}" in pages["findings"]["shown"], pages["findings"]["shown"]
    assert "The figure for plug-in figure could not be drawn" in pages["figure"]["shown"]


def test_a_plug_in_that_fails_only_live_is_named_live(seen: dict[str, Any]) -> None:
    assert any(BAD["exit_live"].reason in reason for reason in seen["live"])


def test_the_end_of_a_run_does_not_wait_for_a_hanging_plug_in(tmp_path: Path) -> None:
    site = install(tmp_path / "site")
    info = site / "bad-1.0.dist-info" / "entry_points.txt"
    info.write_text("[rankscope.analyzers]\nevidence = evidence\nsleeps = sleeps\n")
    waits = (
        (site / "sleeps.py").read_text().replace("time.sleep", f"open({str(tmp_path / 'asked')!r}, 'w'); time.sleep")
    )
    (site / "sleeps.py").write_text(waits)
    run = make_run(tmp_path, ranks=2, steps=5).path
    told = python(site, "-c", ENDING, str(run), str(tmp_path), limit_s="3000")
    assert "sleeps" not in told
    assert "signal" not in told


def test_a_row_without_a_step_is_left_out_alone(seen: dict[str, Any]) -> None:
    assert BAD["row"].reason in " ".join(seen["files"].split())
