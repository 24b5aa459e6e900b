"""The verdict in the second of a stop: the open critical findings as `watch` has reported them, newest report first."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from analyzers.finding import Finding
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from tests.factories import empty_run
from trainer.launcher.script.followed_run import FollowedRun
from trainer.launcher.terminal import stop_report
from trainer.launcher.terminal.stop_report import _findings, last_verdict, open_verdict
from watch.live import _event_columns


def reported(tmp_path: Path, *findings: Finding, node: int = 0) -> RunDir:
    run = RunDir(tmp_path) if RunDir.is_run(tmp_path) else empty_run(tmp_path)
    run.node_dir(node).mkdir(parents=True, exist_ok=True)
    events = EventWriter(run.node_dir(node) / "events.jsonl", attempt=0, rank=NODE_RANK)
    for finding in findings:
        events.write("finding", **_event_columns(finding))
    events.close()
    return run


def hang(status: Any = "fired", severity: Any = "critical", **more: Any) -> Finding:
    values: dict[str, Any] = {"ranks": (1,), "cause": "not_entered", "attempt": 0, "summary": "Rank 1 hangs."} | more
    return Finding(analyzer="hang", kind="hang", status=status, severity=severity, first_step=7, last_step=7, **values)


def texts(run: RunDir) -> list[str]:
    return [Text.from_markup(line).plain for line in open_verdict(run)]


def test_an_open_hang_is_told_with_its_evidence_and_next_step(tmp_path: Path) -> None:
    lines = texts(reported(tmp_path, hang(summary="Rank 1 hangs at first."), hang()))
    assert lines[0] == "Verdict  Rank 1 hangs."
    assert [line.split()[0] for line in lines] == ["Verdict", "Why", "Next"]


def test_what_is_over_or_less_than_critical_is_not(tmp_path: Path) -> None:
    assert texts(reported(tmp_path, hang(), hang("ok", "info"))) == []
    assert texts(reported(tmp_path, hang(severity="warning"))) == []


def test_another_nodes_watch_may_have_reported_it(tmp_path: Path) -> None:
    run = reported(tmp_path, hang(), node=1)
    assert texts(run)[0] == "Verdict  Rank 1 hangs."


def test_of_a_long_record_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_report, "TAIL_BYTES", 4096)
    run = reported(tmp_path, *[hang(severity="warning", summary="x" * 200)] * 50, hang())
    assert texts(run)[0] == "Verdict  Rank 1 hangs."


def test_a_name_with_markup_stays_text(tmp_path: Path) -> None:
    run = reported(tmp_path, hang(summary="Rank 1 hangs in [bold]x[/]."))
    assert texts(run)[0] == "Verdict  Rank 1 hangs in [bold]x[/]."


def test_a_hang_that_lasts_is_told_with_the_silence_up_to_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live report is as of the moment in which the hang was found; the report of the stop is later."""
    summary = "Rank 1 did not reach all_reduce #65. Rank 0 waited for 5.4 s."
    run = reported(tmp_path, hang(summary=summary, evidence={"silent_s": 5.4, "waiting_ranks": [0]}))
    (event,) = _findings(run.node_dir(0) / "events.jsonl")
    monkeypatch.setattr(stop_report.time, "time_ns", lambda: event["wall_ns"] + 42_000_000_000)
    verdict, why, _ = texts(run)
    assert verdict == "Verdict  Rank 1 did not reach all_reduce #65. Rank 0 waited for 47.4 s so far."
    assert "for 47.4 s" in why


@pytest.mark.parametrize(
    ("number", "codes", "times"),
    [(signal.SIGTERM, (-9, -15), 1), (signal.SIGTERM, (-9, 1), 2), (signal.SIGINT, (-9, -9), 2)],
    ids=["silent", "one-raised", "killed-after-they-printed-their-interrupt"],
)
def test_the_verdict_is_repeated_only_where_a_rank_may_have_printed_below_it(
    tmp_path: Path, number: int, codes: tuple[int, ...], times: int
) -> None:
    written = io.StringIO()
    followed = FollowedRun(Console(file=written, width=200))
    followed._run = reported(tmp_path, hang())
    followed.report(number)
    for rank, code in enumerate(codes):
        followed.ended(rank=rank, pid=0, code=code, is_stopped=True)
    assert followed.conclude(exit_code=0, reason="interrupted")
    assert written.getvalue().count("Rank 1 hangs.") == times
    assert written.getvalue().strip().splitlines()[-1].startswith("Report   rankscope analyze ")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "Verdict  No problems were found during the run. Its last records were not judged."),
        ([hang("ok", "info")], "Verdict  No problems were found during the run. Its last records were not judged."),
        ([hang(severity="warning", summary="Rank 1 is slow.")], "Verdict  Rank 1 is slow."),
    ],
)
def test_a_stop_without_time_for_the_last_records_has_a_verdict(
    tmp_path: Path, found: list[Finding], expected: str
) -> None:
    assert [Text.from_markup(line).plain for line in last_verdict(reported(tmp_path, *found))] == [expected]


def test_the_second_ctrl_c_kills_and_ends_with_a_verdict(tmp_path: Path) -> None:
    run, output = reported(tmp_path), io.StringIO()
    followed = FollowedRun(Console(file=output, width=200))
    followed._run = run
    followed.end_at_once(signal.SIGINT, "SIGINT was received again.")
    lines = output.getvalue().splitlines()
    assert lines[0] == "Killed the remaining processes. SIGINT was received again."
    assert lines[1].startswith("Verdict  No problems were found during the run.")
    assert lines[2].startswith("Report   rankscope analyze")
