from __future__ import annotations

import functools
import inspect
import io
import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

import analyzers
from analyzers.causes import CAUSES, cause_names
from analyzers.deaths.rank_lost import ON_PURPOSE
from analyzers.diagnose import Diagnosis, conclude, diagnose, reaching
from analyzers.finding import Finding
from analyzers.hangs import culprits, mismatches
from analyzers.health.analyze import THROTTLE_BITS
from analyzers.health.xids import xid_table
from analyzers.kinds import KINDS
from analyzers.numerics.nonfinite_origin import Phase
from analyzers.report.json import to_json
from analyzers.report.terminal.diagnosis_text import render
from analyzers.report.wording.explained import next_step, why
from analyzers.run.ends.endings import DeathCause
from analyzers.run.policy import stall_policy
from analyzers.settings.analyze import RULES
from analyzers.stragglers import analyze as straggler
from probes.tape.format.schema import TABLES
from probes.tape.redaction.printable import visible
from store.readers.logs.rules import load_rules
from tests.analyzers.deaths.lost_ranks import killed
from tests.analyzers.hangs.test_hang_and_end import hung_killed_and_restarted
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.numerics.test_nonfinite import run_with_nan
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.standstill import World
from tests.analyzers.stragglers.test_straggler import stored
from tests.depth import later

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = {"run_id": "demo-1", "config": {"run": {"name": "demo"}, "recovery": {"hang_floor_s": 3.0}}}


def text_of(diagnosis: Diagnosis, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    render(diagnosis, console)
    output: str = console.file.getvalue()  # type: ignore[attr-defined]
    return output


def clean_run() -> MemoryStore:
    store = stored(simulate(1, steps=200))
    store.connection.execute(
        "UPDATE steps SET loss = 2.0 - step / 400.0, grad_norm = 1, committed = true, tokens = 512, "
        "local_grad_norm = 1 + 0.3 * ((step + rank) % 3)"
    )
    store.connection.execute("UPDATE collectives SET bytes = 1 << 22, wait_ns = end_ns - issue_ns, phase = 'backward'")
    identity = [{"attempt": 0, "rank": r, "wall_ns": 1, "world_size": 4, "host": "a", "device": "cpu", "dp_shard": r}
                for r in range(4)]  # fmt: skip
    store.add("ranks", identity)
    checked = {"attempt": 0, "step": 50, "taken_ns": 1, "replica_group": "dp_replicate:0-3", "tensor": "(all)"}
    store.add("fingerprints", [checked | {"rank": rank, "hash": 5} for rank in range(4)])
    store.add("spans", [{"attempt": 0, "rank": rank, "step": 1, "kind": "forward"} for rank in range(4)])
    for rank in range(4):
        store.event("rank_closed", rank=rank, wall_ns=10**12)
    store.event("run_ended", wall_ns=10**12, reason="finished", exit_code=0)
    store.connection.execute("UPDATE steps SET memory_bytes = 1 << 30")
    store.event("attempt_started", wall_ns=0)
    host = {"attempt": 0, "rank": -1, "node": "a", "device": "host", "load_1m": 1.0, "num_cpus": 8}
    host |= {"disk_free_bytes": 1 << 40, "memory_used_bytes": 1 << 30, "memory_total_bytes": 1 << 40}
    store.add("health", [host | {"sample_ns": second} for second in range(3)])
    for step in (20, 40, 60, 180):
        saved = {"attempt": 0, "rank": 0, "wall_ns": step, "step": step, "tier": "disk", "state": "good"}
        store.add("checkpoints", [saved | {"stall_ns": 1000, "duration_ns": 5000}])
    return store


def test_a_clean_run() -> None:
    diagnosis = diagnose(clean_run(), MANIFEST)
    assert [f for f in diagnosis.findings if f.status != "ok"] == []
    assert diagnosis.verdict == "No problems found (200 steps, 4 ranks)."
    assert diagnosis.run["mesh"] == {"dp_shard": 4}
    assert diagnosis.run["tokens_per_s"] > 0
    text = text_of(diagnosis)
    for words in (
        "Verdict",
        "No problems found",
        "demo-1",
        "4 ranks",
        "dp_shard 4",
        "200 steps",
        "finished",
        "tokens/s",
    ):
        assert words in text


def test_the_worst_comes_first_and_is_the_verdict() -> None:
    store = run_with_nan()
    identity = [{"attempt": 0, "rank": rank, "wall_ns": 1, "world_size": 4} for rank in range(4)]
    store.add("ranks", identity)
    diagnosis = diagnose(store, MANIFEST)
    assert [finding.kind for finding in diagnosis.fired] == ["rank_lost", "non_finite"]
    assert diagnosis.verdict.startswith("Records incomplete: all 4 ranks stopped")
    second = diagnosis.verdict.splitlines()[1].removeprefix("Already over: ")
    assert diagnosis.fired[1].summary.startswith(second), "each further finding has a line"


def test_json_has_the_documented_fields() -> None:
    store = stored(simulate(2, steps=120, faults=[Slow(rank=3, step=60, factor=1.5)]))
    report = json.loads(json.dumps(to_json(diagnose(store, MANIFEST)), allow_nan=False))
    assert list(report) == ["schema_version", "run", "verdict", "findings", "goodput", "what_if"]
    assert report["schema_version"] == 2
    (finding,) = [f for f in report["findings"] if f["status"] == "fired"]
    prescribed = ["analyzer", "kind", "severity", "status", "ranks", "first_step", "last_step", "cause", "summary",
                  "evidence", "advice"]  # fmt: skip
    assert [name for name in finding if name != "id"][: len(prescribed)] == prescribed
    assert (finding["kind"], finding["ranks"], finding["cause"]) == ("straggler", [3], "compute")


def test_an_analyzer_that_fails_costs_only_its_own_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> list[Finding]:
        raise ZeroDivisionError("a damaged row")

    monkeypatch.setattr(straggler, "load_timings", broken)
    diagnosis = diagnose(killed(2).store, MANIFEST)
    assert [finding.kind for finding in diagnosis.fired] == ["rank_lost"]
    (failed,) = [f for f in diagnosis.not_judged if f.kind == "straggler"]
    assert "ZeroDivisionError: a damaged row" in failed.summary
    assert "more data: see Not judged." in diagnosis.verdict


@functools.cache
def without(*tables: str) -> tuple[MemoryStore, Diagnosis]:
    """The clean run without these tables, and what is said of it."""
    store = clean_run()
    for table in tables:
        store.drop(table)
    return store, diagnose(store, MANIFEST)


@later("test_missing_inputs.py::test_a_missing_table_is_reported, with all that is not judged then")
@pytest.mark.parametrize("table", sorted(TABLES))
def test_a_missing_table_is_reported_and_breaks_nothing(table: str) -> None:
    _, diagnosis = without(table)
    if table in ("steps", "ranks", "events", "collectives", "fingerprints", "spans"):
        assert diagnosis.not_judged
    assert "failed" not in " ".join(finding.summary for finding in diagnosis.findings)
    assert json.dumps(to_json(diagnosis), allow_nan=False)
    assert text_of(diagnosis)


def test_an_empty_store_is_not_healthy() -> None:
    diagnosis = diagnose(MemoryStore(), {})
    assert diagnosis.fired == ()
    assert len(diagnosis.not_judged) >= 4
    lines = text_of(diagnosis).splitlines()
    assert sum(line.startswith("Not judged  ") for line in lines) == len(diagnosis.not_judged)
    first = next(place for place, line in enumerate(lines) if line.startswith("Not judged"))
    last = next(place for place, line in enumerate(lines) if place > first and not line.strip())
    assert {line[:12].strip() for line in lines[first:last]} == {"Not judged", ""}, "what wraps is below its text"


def test_exit_codes() -> None:
    warning = Finding(analyzer="a", kind="k", severity="warning", status="fired", summary="s")
    assert reaching([warning], "warning") == [warning]
    assert not reaching([warning], "critical")
    assert not reaching([], "warning")


def test_the_configured_floor_counts() -> None:
    assert stall_policy(MANIFEST).floor_s == 3.0
    for odd in ({}, {"config": None}, {"config": {"recovery": {"hang_floor_s": "x"}}}, {"config": {"recovery": 3}}):
        assert stall_policy(odd).floor_s == 5.0


HOSTILE = "[bold red]x[/] \x1b[2J\x1b]0;title\x07 \u202e [link=file:///etc]y[/link]\r\n"


def test_text_of_the_run_is_shown_and_never_obeyed() -> None:
    world = World()
    world.event("exception", 0.1, rank=1, type="ValueError", message=HOSTILE + "\nsecond line")
    diagnosis = diagnose(world.store, MANIFEST | {"run_id": HOSTILE})
    for width in (60, 100):
        text = text_of(diagnosis, width)
        assert "[bold red]x[/]" in text
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert visible("a\x1bb") == "a\ufffdb"


@pytest.mark.parametrize("make", [hung_killed_and_restarted, lambda: killed(2), lambda: World()])
def test_reports_fit_a_hundred_columns(make: Any) -> None:
    diagnosis = diagnose(make().store, MANIFEST)
    text = text_of(diagnosis)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    for words in ("Verdict", "Next", "rankscope explain "):
        assert words in " ".join(text.split()) + " "
    worst = diagnosis.fired[0]
    assert ("\nWhy  " in text) == (why(worst) != worst.summary), "it never repeats the verdict"


def hang_causes() -> set[str]:
    """Causes of `hang` from tapes and dumps, as the code names them."""
    source = "".join(inspect.getsource(module) for module in (culprits, mismatches))
    named = set(re.findall(r'_cause\((?:"\w+" if \w+ else )?"(\w+)"', source)) | set(
        re.findall(r'"(mismatch_\w+)", lambda', source)
    )
    absent = set(re.findall(r'"(\w+)"', inspect.getsource(culprits._cause_of_absence)))
    return named | absent | set(culprits._PHASE_CAUSES.values())


def test_causes_in_logs_have_a_kind_and_a_next_step() -> None:
    folder = ROOT / "analyzers"
    of_texts = ("deaths/logged/*.py", "hangs/logged/*.py", "evidence/log_*.py")
    source = "".join(path.read_text() for glob in of_texts for path in folder.glob(glob))
    literal = re.findall(r'from_lines\(\s*"(\w+)",\s+\w+,\s+rank_class="(\w+)",(?!\s+kind=)', source)
    hangs = {cause for cause, rank_class in literal if rank_class in ("mismatch", "hang")}
    hangs |= set(re.findall(r'[ (]_candidate\(\s*"(\w+)"', source))
    lost = {cause for cause, rank_class in literal if rank_class not in ("mismatch", "hang", "numerics")}
    assert len(hangs) >= 5
    assert len(lost) >= 6
    assert hangs <= cause_names("hang")
    assert lost.isdisjoint(cause_names("hang"))
    of_rules = {rule.cause for rule in load_rules() if rule.cause}
    assert hangs | lost | of_rules <= {*CAUSES}


def test_every_anchor_that_can_be_emitted_is_in_the_runbook() -> None:
    anchors = set(re.findall(r'<a id="([^"]+)"></a>', (ROOT / "docs" / "runbook.md").read_text()))
    causes = {
        "non-finite": set(get_args(Phase)),
        "straggler": {"compute", "data", "communication", "host", "sequence-length", "gpu-clock"},
        "loss-spike": {"batch", "learning_rate", "divergence", "weights", "transient"},
        "rank-lost": {
            *get_args(DeathCause),
            "no_dump",
            "killed_all",
            "store_lost",
            "connection_lost",
            "launcher_lost",
            ON_PURPOSE,
        }
        | ({*CAUSES} - cause_names("hang")),
        "throughput": {"compute", "communication", "data", "unknown", "periodic", "between_runs"},
        "configuration": {*RULES},
        "xid": {about["class"] for about in xid_table()["xid"].values()} | {"unknown"},
        "gpu-memory-errors": {"uncorrected", "corrected", "remapped", "remap_failed"},
        "gpu-throttled": {cause for cause, _ in THROTTLE_BITS.values()},
        "link-errors": {"nvlink", "pcie", "infiniband", "infiniband_down", "tcp"},
        "expert-imbalance": {"hot", "dead", "dropped"},
        "host-pressure": {"blocked", "cpu_limit", "disk", "disk_latency", "heat", "memory", "run_queue"},
        "desync": {"skipped", "extra"},
        "hang": hang_causes() | cause_names("hang"),
    }
    expected = {f"{kind}-{cause}" for kind, of_kind in causes.items() for cause in of_kind}
    without_cause = {name.replace("_", "-") for name, kind in KINDS.items() if kind.drawn} - {*causes}
    of_findings = {anchor for anchor in anchors if not anchor.startswith("alert-")}  # Prometheus sends people to those
    assert (
        expected
        | without_cause
        | {"insufficient-data", "analyzer-failed", "plugin-failed", "standstill", "logged-value", "padding"}
        == of_findings
    )
    source = "".join(path.read_text() for path in Path(analyzers.__path__[0]).rglob("*.py"))
    emitted = set(re.findall(r'advice=f?"([a-z_-]+)', source))
    assert {name for name in emitted if not name.endswith("-")} <= anchors
    of_devices = {kind.replace("_", "-") for kind in re.findall(r'_device\("(\w+)"', source)} | {"host-pressure"}
    of_causes = {row.kind.replace("_", "-") for row in CAUSES.values()}
    assert {name.rstrip("-") for name in emitted if name.endswith("-")} | of_devices | of_causes == {*causes}
    advised = set(re.findall(r'Finding.advise\(\s*"\w+",\s*"(\w+)"', source))
    assert {kind.replace("_", "-") for kind in advised} <= anchors | {*causes}
    for kind in advised:
        advice, _, _ = next_step(Finding.advise("test", kind, "Text.")).partition("See `rankscope explain")
        assert advice.strip(), kind
        assert "see the runbook" not in advice, kind


def test_numbers_that_json_cannot_hold() -> None:
    finding = Finding(analyzer="a", kind="k", severity="info", status="fired", summary="s", evidence={"x": math.nan})
    report = to_json(Diagnosis(run={"y": math.inf}, verdict="v", findings=(finding,)))
    assert (report["run"]["y"], report["findings"][0]["evidence"]["x"]) == (None, None)


def test_a_run_that_failed_without_a_finding_gets_no_clean_bill() -> None:
    verdict = conclude([], {"steps": 12, "num_ranks": 2, "ended": "failed"}).verdict
    assert "No problems found" not in verdict
    assert verdict.startswith("The run failed, and its records do not show why.")


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (
            {"reason": "failed", "exit_code": 2, "message": "No module named 'safetensors'"},
            "The launch ended with code 2 before any rank had started: No module named 'safetensors'.",
        ),
        (
            {
                "reason": "launcher_lost",
                "exit_code": None,
                "message": "The launcher (process 7) was killed or crashed.",
            },
            "The launch ended before any rank had started: The launcher (process 7) was killed or crashed.",
        ),
        ({}, "No rank had started when the records end: the launch was killed, crashed or has just begun."),
    ],
)
def test_a_launch_that_ended_before_any_rank_started_is_one_sentence(end: dict[str, Any], verdict: str) -> None:
    store = MemoryStore()
    store.event("run_started", wall_ns=10**18, node_rank=0, nproc_per_node=4)
    if end:
        store.event("run_ended", wall_ns=10**18 + 1, node_rank=0, **end)
    diagnosis = diagnose(store, {})
    assert diagnosis.verdict == verdict
    assert [one.summary for one in diagnosis.not_judged] == ["No check was made: no rank had started."]
    console = Console(width=100, no_color=True, record=True, file=io.StringIO())
    render(diagnosis, console)
    printed = console.export_text()
    assert "lines of" not in printed
    assert "_" not in printed
    assert "\n\n\n" not in printed
