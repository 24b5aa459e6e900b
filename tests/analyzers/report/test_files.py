"""Reports as files: what is in them, that nothing of the run is obeyed, and the command that writes them."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.report.chrome_trace import choice
from analyzers.report.chrome_trace.tracks import RUN
from analyzers.report.chrome_trace.write import write_trace
from analyzers.report.files import ReportError, step_range, write_trace_file
from analyzers.report.html.diagnosis_page import render
from analyzers.report.markdown import to_markdown
from probes.tape.format.schema import TABLES
from probes.tape.rundir import RunDir
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.report.hostile import hostile_run
from tests.analyzers.test_diagnose import MANIFEST, without
from tests.analyzers.test_missing_inputs import NOT_NEEDED
from tests.depth import later
from tests.e2e.launched import rankscope
from tests.factories import RankWriter, empty_run, make_run


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text outside of scripts and styles."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        self._inside = tag if tag in ("script", "style") else self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        self.text += "" if self._inside else data


def html_of(run: RunDir) -> tuple[bytes, Diagnosis]:
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest(), stacks_dir=run.stacks)
        return render(store, diagnosis, run.manifest()), diagnosis


def figures_of(page: bytes) -> dict[str, Any]:
    pattern = r'<script type="application/json" id="([^"]+)">(.*?)</script>'
    return {name: json.loads(text) for name, text in re.findall(pattern, page.decode(), flags=re.DOTALL)}


def test_a_report_says_that_its_events_are_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=9)
    assert "The first and the last" not in Elements(html_of(run)[0]).text
    writer = RankWriter(run, rank=0, attempt=1)
    for step in range(500):
        writer.event("checkpoint", step=step, tier="disk", state="complete")
    writer.close()
    assert "The first and the last 200 events of the run." in Elements(html_of(run)[0]).text


@pytest.mark.parametrize(
    ("outcome", "made"),
    [("clean", {"steps": 80}), ("unjudged", {"steps": 0}), ("failed", {"steps": 12, "end": "failed"})],
)
def test_a_verdict_without_findings_is_green_only_if_steps_were_judged(
    tmp_path: Path, outcome: str, made: dict[str, Any]
) -> None:
    page, diagnosis = html_of(make_run(tmp_path, ranks=2, **made))
    assert not diagnosis.cards
    elements = Elements(page)
    assert [of["class"] for _, of in elements.found if "verdict" in str(of.get("class"))] == [f"card verdict {outcome}"]
    assert "There are no findings" not in elements.text


def test_a_page_holds_the_verdict_the_findings_and_their_figures(tmp_path: Path) -> None:
    page, diagnosis = html_of(make_run(tmp_path, ranks=4, steps=80, slow={2: 1.6}, nan={1: 30}))
    elements = Elements(page)
    assert len(page) < 6e6
    assert diagnosis.verdict in elements.text
    for finding in diagnosis.fired:
        assert finding.summary in elements.text
    for words in ("Why", "Next", "Where the time went", "Ranks and steps", "Timeline", "Collectives", "Events"):
        assert words in elements.text
    places = [attributes["data-figure"] for tag, attributes in elements.found if "data-figure" in attributes]
    figures = figures_of(page)
    assert len(places) >= 10
    assert set(places) | {"templates"} == set(figures)
    assert all(figures[name]["data"] for name in places if name)
    for tag, attributes in elements.found:  # nothing from elsewhere
        if is_dashboard_link(tag, attributes):
            continue
        outside = [attributes.get(name) for name in ("src", "href", "action") if attributes.get(name)]
        assert all(str(link).startswith("data:") for link in outside), (tag, attributes)


def is_dashboard_link(tag: str, attributes: dict[str, str | None]) -> bool:
    """A link to a finding's page on this machine, or to the runbook below: no text of the run can leave either."""
    pattern = r"http://127\.0\.0\.1:8501/findings\?run=[\w.%+-]+&finding=[\w.%+-]+|#runbook-[a-z0-9_-]+"
    return tag == "a" and re.fullmatch(pattern, str(attributes.get("href"))) is not None


def test_nothing_of_a_hostile_run_is_obeyed_by_a_page(tmp_path: Path) -> None:
    page, _ = html_of(hostile_run(tmp_path))
    elements = Elements(page)
    own = [(tag, attributes) for tag, attributes in elements.found if not is_dashboard_link(tag, attributes)]
    assert not {"img", "a", "b", "iframe"} & {tag for tag, attributes in own if tag != "b" or attributes}
    assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
    assert len([tag for tag, _ in elements.found if tag == "script"]) == len(figures_of(page)) + 2
    assert "window.owned=1" in elements.text  # it is shown
    assert not re.search(r"[\x00-\x08\x0b\x0e-\x1f\u202a-\u202e\u2066-\u2069]", elements.text)
    shown = [text for figure in figures_of(page).values() for text in strings(figure)]
    assert any("window.owned" in text for text in shown)
    assert not [text for text in shown if re.search(r"<\s*(script|img|a)\b|[\x1b\u202e]", text)]
    assert len(page) < 6e6


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(
    "tables",
    [
        *([name] for name in sorted(TABLES.keys() - NOT_NEEDED.keys())),
        [*NOT_NEEDED],
        *(pytest.param([name], marks=later("all of them at once: the case before")) for name in NOT_NEEDED),
    ],
    ids=lambda tables: tables[0] if len(tables) == 1 else "all that are not needed",
)
def test_every_report_is_made_without_any_one_table(tmp_path: Path, tables: list[str]) -> None:
    store, diagnosis = without(*tables)
    assert diagnosis.verdict.encode() in render(store, diagnosis, MANIFEST)
    assert "Verdict" in to_markdown(diagnosis, MANIFEST)
    write_trace(store, tmp_path / "trace.json")
    json.loads((tmp_path / "trace.json").read_text())


def test_a_trace_of_one_attempt_and_some_ranks_holds_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=3, steps=8, kill={1: 6})
    make_run(tmp_path, run=run, attempt=1, ranks=3, steps=4, first_step=5)
    path = tmp_path / "trace.json"

    def events(**choice: Any) -> list[dict[str, Any]]:
        with Store.open(run) as store:
            write_trace(store, path, **choice)
        return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"]

    def steps_of(found: list[dict[str, Any]]) -> list[tuple[int, str]]:
        return sorted((e["pid"], e["name"]) for e in found if e["ph"] in "XB" and e["name"].startswith("step "))

    assert len(steps_of(events(steps=(5, 6)))) == 3 * 2 * 2
    assert steps_of(events(steps=(5, 6), attempt=1, ranks=[0, 2])) == [
        (rank, f"step {step}") for rank in (0, 2) for step in (5, 6)
    ]
    chosen = events(steps=(5, 6), attempt=1, ranks=[2])
    assert {event["pid"] for event in chosen} == {2, RUN}
    assert {event["ph"] for event in chosen if event["pid"] == RUN} <= {"X", "C", "i"}


def test_reports_of_an_empty_store(tmp_path: Path) -> None:
    diagnosis = diagnose(MemoryStore(), {})
    assert b"Not judged" in render(MemoryStore(), diagnosis, {})
    assert "Not judged" in to_markdown(diagnosis, {})
    assert write_trace(MemoryStore(), tmp_path / "trace.json") == 0


def test_a_ticket_says_what_is_wrong_what_was_done_and_what_next(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=80, slow={2: 1.6})
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest())
    ticket = to_markdown(diagnosis, run.manifest())
    html = MarkdownIt("gfm-like", {"linkify": False}).render(ticket)
    for words in ("<strong>Verdict:</strong>", "Straggler", "Actions taken", "rankscope explain", "<table>", "Next:"):
        assert words in html
    assert diagnosis.fired[0].summary in html.replace("&quot;", '"')
    assert "See <code>rankscope explain straggler-" in html, "a command to copy is code"
    assert "\\`" not in ticket


def test_a_ticket_says_which_findings_are_over_and_which_steps_were_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=120, slow={2: 1.6}, slow_from=60, spikes={40: 9.0})
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest())
    ticket = to_markdown(diagnosis, run.manifest())
    assert re.findall(r"^## \d\. (.*)", ticket, flags=re.MULTILINE) == [
        "Straggler (warning)", "Loss spike (warning, over)",
    ]  # fmt: skip
    assert "- No refused step, rollback, restart or exclusion is recorded." in ticket
    spike = next(finding for finding in diagnosis.findings if finding.kind == "loss_spike")
    refused = replace(spike, evidence={**spike.evidence, "update_skipped": True})
    assert "- Refused the update of step 40." in to_markdown(replace(diagnosis, findings=(refused,)), {})


def test_a_ticket_has_no_row_for_what_is_unknown(tmp_path: Path) -> None:
    run = empty_run(tmp_path, world_size=2)
    with Store.open(run) as store:
        ticket = to_markdown(diagnose(store, run.manifest()), run.manifest())
    facts = ticket.partition("## The run")[2]
    assert "None" not in facts, facts
    assert "?" not in facts, facts


def test_the_configuration_of_a_page_is_for_people(tmp_path: Path) -> None:
    """Settings and the launch; no process id, digest or clock value."""
    run = empty_run(
        tmp_path, world_size=2, launcher_pid=4711, digest="16d2668f", command=["train.py", "--name", "a b"],
        cwd="/job", versions={"torch": "2.13.0"}, start_over_at=None, config={"train": {"steps": 100}},
    )  # fmt: skip
    text = Elements(html_of(run)[0]).text
    settings = text[text.index("Configuration") :]
    for words in ("command", "train.py --name 'a b'", "working directory", "versions.torch", "train.steps", "100"):
        assert words in settings
    for words in ("launcher_pid", "4711", "digest", "created_wall_ns", "schema_version", "start_over_at"):
        assert words not in settings


def test_nothing_of_a_hostile_run_is_obeyed_by_a_ticket(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    with Store.open(run) as store:
        ticket = to_markdown(diagnose(store, run.manifest()), run.manifest())
    assert len(ticket) < 300_000
    html = MarkdownIt("gfm-like", {"linkify": False}).render(ticket)
    known = {"h1", "h2", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "pre", "code"}
    assert {tag for tag, _ in Elements(html.encode("utf-8", "replace")).found} <= known
    assert not re.search(r"[\x1b\u202e]", ticket)


def trace_of(run: RunDir, path: Path, **options: Any) -> list[dict[str, Any]]:
    with Store.open(run) as store:
        write_trace(store, path, compressed=path.suffix == ".gz", **options)
    written = path.read_bytes()
    trace = json.loads(gzip.decompress(written) if path.suffix == ".gz" else written)
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_has_every_record_where_it_belongs(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, ranks=3, steps=20, hang={1: 20})
    events = trace_of(run, tmp_path / name)
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert named[2, None] == "rank 2"
    slices = [e for e in events if e["ph"] in "XB"]
    with Store.open(run) as store:
        for table, threads in (("steps", "steps"), ("spans", "phases"), ("collectives", "collectives 0")):
            ((rows,),) = store.rows(f"SELECT count(*) FROM {table}")
            assert len([e for e in slices if named[e["pid"], e["tid"]] == threads]) == rows, table
    in_flight = {(e["pid"], e["name"]) for e in slices if e["ph"] == "B"}
    assert {(0, "all_reduce"), (2, "all_reduce"), (1, "step 20")} <= in_flight
    assert all(event["ts"] >= 0 for event in slices)
    for rank in range(3):  # slices of one thread nest or follow one another, as the format demands
        for thread in {e["tid"] for e in slices}:
            of = sorted((e["ts"], -e["dur"]) for e in slices if (e["pid"], e["tid"], e["ph"]) == (rank, thread, "X"))
            open_until: list[float] = []
            for begin, minus_length in of:
                while open_until and open_until[-1] <= begin + 0.001:
                    open_until.pop()
                assert not open_until or begin - minus_length <= open_until[-1] + 0.001
                open_until.append(begin - minus_length)


def test_a_trace_of_some_steps(tmp_path: Path) -> None:
    events = trace_of(make_run(tmp_path, ranks=2, steps=30), tmp_path / "trace.json", steps=(10, 12))
    assert {e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0} == {"step 10", "step 11", "step 12"}


def test_a_trace_of_a_hostile_run_is_plain_json_of_bounded_texts(tmp_path: Path) -> None:
    events = trace_of(hostile_run(tmp_path), tmp_path / "trace.json")
    assert max(len(text) for event in events for text in strings(event)) <= 200
    assert not [text for event in events for text in strings(event) if re.search(r"[\x1b\u202e]", text)]


def test_a_long_trace_takes_no_more_memory_than_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CHUNK_ROWS", 1_000)
    store = MemoryStore()
    num = 12_000
    store.connection.execute(
        "INSERT INTO spans (attempt, rank, step, kind, start_ns, end_ns, wait_ns) "
        f"SELECT 0, i % 4, i // 40, 'forward', 1000000000 + i * 1000, 1000000900 + i * 1000, 0 FROM range({num}) t(i)"
    )
    peaks = []
    for steps in ((0, num // 40 // 4), None):
        tracemalloc.start()
        write_trace(store, tmp_path / "trace.json", steps=steps)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > num
    assert peaks[1] < 1.5 * peaks[0]


def test_ranges_of_steps() -> None:
    assert (step_range(""), step_range("40"), step_range("38:42")) == (None, (40, 40), (38, 42))
    for wrong in ("a", "5:1", ":", "1:b", "1:2:3", "-1:2"):
        with pytest.raises(ReportError, match="FIRST:LAST"):
            step_range(wrong)


def test_the_command_writes_what_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    run = make_run(tmp_path, ranks=2, steps=20)
    done = rankscope("report", str(run.path))
    assert done.returncode == 0, done.stderr
    assert (run.reports / "report.html").stat().st_size > 1e6
    ticket, trace = tmp_path / "new" / "ticket.md", tmp_path / "trace.json.gz"
    done = rankscope("report", str(run.path), "--markdown", str(ticket), "--chrome-trace", str(trace), "--steps", "3:4")
    assert done.returncode == 0, done.stderr
    assert ticket.exists()
    assert gzip.decompress(trace.read_bytes()).startswith(b'{"displayTimeUnit"')
    assert not [path for path in tmp_path.rglob(".*") if path.is_file() and "report" in path.name]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    (tmp_path / "file").write_text("")
    done = rankscope("report", str(run.path), "--markdown", str(tmp_path / "file" / "ticket.md"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "there is no folder" in done.stderr
    assert rankscope("report", str(run.path), "--steps", "x", "--chrome-trace", str(tmp_path / "t")).returncode == 2


def test_a_trace_of_steps_that_were_not_recorded_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=5)
    with Store.open(run) as store:
        with pytest.raises(ReportError, match=r"^--steps 90:91: not recorded; the run has steps 1 to 5$"):
            write_trace_file(store, tmp_path / "trace.json", steps=(90, 91))
        assert write_trace_file(store, tmp_path / "trace.json", steps=(5, 90))[0] > 0
    assert [path.name for path in tmp_path.glob("*.json")] == ["trace.json"]
