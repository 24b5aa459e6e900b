"""Lines of progress follow the tapes of rank 0, also where retention takes away their first segments."""

from __future__ import annotations

import io
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from analyzers.report.terminal.time_left import TimeLeftColumn
from probes.tape.events import EventWriter, read_events
from probes.tape.format.reader import segment_paths
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, TapeWriter
from probes.tape.rundir import NODE_RANK
from tests.factories import RankWriter, empty_run, make_run
from tests.waiting import wait_for
from trainer.config.config import Config
from trainer.launcher import supervise
from trainer.launcher.node import Node
from trainer.launcher.terminal import progress
from trainer.layout.resolve import resolve

STEPS = 200


def test_progress_goes_on_when_the_first_segments_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_S", 0.0)
    run = empty_run(tmp_path)
    writer = RankWriter(run, 0)
    small = replace(TABLES["steps"], segment_bytes=8192)
    writer.tapes["steps"] = TapeWriter(writer.directory, small, rank=0, attempt=0)
    values = {"start_ns": 0, "duration_ns": 1_000_000, "loss": 2.0, "tokens": 64, "memory_bytes": 2**20}

    def write(first: int) -> None:
        for step in range(first, first + STEPS):
            writer.append("steps", COMPLETE, step=step, **values)

    written = io.StringIO()
    console = Console(file=written, width=200)
    view = progress.ProgressView(run, steps=4 * STEPS, plan=resolve(Config(), 1), console=console)
    with view:
        write(1)
        wait_for(lambda: f"step   {STEPS}/" in written.getvalue(), "the first line")
        for path in segment_paths(writer.directory, "steps")[:-1]:
            path.unlink()
        write(STEPS + 1)
        wait_for(lambda: f"step   {2 * STEPS}/" in written.getvalue(), "a line after segments were removed")
        for path in segment_paths(writer.directory, "steps")[:-1]:
            path.unlink()
        write(2 * STEPS + 1)
        wait_for(lambda: f"step   {3 * STEPS}/" in written.getvalue(), "the last line")


def test_a_replay_without_a_rollback_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_LINE_S", 0.0)
    run = empty_run(tmp_path)
    writer = RankWriter(run, 0)
    written = io.StringIO()
    view = progress.ProgressView(run, steps=STEPS, plan=resolve(Config(), 1), console=Console(file=written, width=200))
    with view:
        writer.events.write("replay", step=7, verdict="non_finite", state="same", came_back=False)
        wait_for(lambda: "NaN" in written.getvalue(), "the line")
    assert written.getvalue().splitlines() == ["step     7  NaN or Inf, which a replay did not reproduce."]


@pytest.mark.parametrize("has_faults", [False, True])
def test_other_ranks_are_read_only_for_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_faults: bool
) -> None:
    """Reading the events of 1,000 ranks four times a second would take a fifth of a core of every launcher."""
    run = empty_run(tmp_path)
    ranks = [RankWriter(run, rank) for rank in range(4)]
    read: set[str] = set()

    def recorded(path: Path, *arguments: Any) -> Any:
        read.add(path.parent.name)
        return read_events(path, *arguments)

    monkeypatch.setattr(progress, "read_events", recorded)
    written = io.StringIO()
    view = progress.ProgressView(
        run, steps=STEPS, plan=resolve(Config(), 1), console=Console(file=written, width=200), has_faults=has_faults
    )
    with view:
        ranks[3].events.write("fault_injected", step=7, fault="hang")
        ranks[0].events.write("checkpoint", step=7, tier="disk", state="condemned", reason="It is short.")
        wait_for(lambda: "short" in written.getvalue(), "a line of rank 0")
    assert ("Injected hang on rank 3." in written.getvalue()) == has_faults
    assert read == {"node-00000", "rank-00000"} | ({"rank-00001", "rank-00002", "rank-00003"} if has_faults else set())


def test_a_resumed_launch_shows_its_own_steps_and_what_it_could_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the last step of the launch before, which has no loss where its rank was killed."""
    monkeypatch.setattr(progress, "PLAIN_LINE_S", 0.0)
    run = empty_run(tmp_path)
    values = {"start_ns": 0, "duration_ns": 1_000_000, "tokens": 64, "memory_bytes": 2**20}
    RankWriter(run, 0).append("steps", COMPLETE, step=32, loss=float("nan"), **values)
    written = io.StringIO()
    view = progress.ProgressView(run, steps=STEPS, plan=resolve(Config(), 1), console=Console(file=written, width=200))
    with view:
        writer = RankWriter(run, 0, attempt=1)
        writer.events.write("checkpoint", step=31, tier="disk", state="condemned", reason="rank 0: a.distcp is short.")
        wait_for(lambda: "short" in written.getvalue(), "the checkpoint")
        writer.append("steps", COMPLETE, step=31, loss=2.0, **values)
        wait_for(lambda: "loss" in written.getvalue(), "the first step")
    first, *steps = written.getvalue().splitlines()
    assert first == "step    31  The checkpoint of this step is not used: rank 0: a.distcp is short."
    assert [line.partition(" tokens")[0] for line in steps] == ["step    31/200  loss 2.000  64.0 k"]


def test_a_rollback_is_told_once_with_its_replay(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir()
    node = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    rank = RankWriter(run, 0)
    written = io.StringIO()
    view = progress.ProgressView(run, steps=STEPS, plan=resolve(Config(), 1), console=Console(file=written, width=200))
    with view:
        rank.events.write("replay", step=7, verdict="spike", state="same", came_back=True)
        rank.events.write(
            "rollback", step=7, from_step=7, to_step=4, tier="memory", duration_s=0.159, skipped_batches=[6]
        )
        wait_for(lambda: "Rolled back" in written.getvalue(), "the rollback")
        did = "Rolled back to step 4 from memory in 0.2 s and skipped batch 6."
        report(node, f"Loss rose to 9 at step 7. {did}", restored_step=4)
        report(node, f"Loss rose to 9 at step 7, in batch 6. {did}", restored_step=4, line="train.py:7 step")
        wait_for(lambda: "train.py:7" in written.getvalue(), "the finding's line of code")
    assert written.getvalue().splitlines() == [
        "step     7  Loss spike, which a replay reproduced. Rolled back to step 4 from memory in 0.2 s and skipped "
        "batch 6.",
        "STRAGGLER  Loss rose to 9 at step 7.",
        "STRAGGLER  Rank 1: most stack samples are at train.py:7 step.",
    ]


def test_a_finding_is_announced_once(tmp_path: Path) -> None:
    """Watch reports it again with other figures, a higher severity or its line of code."""
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir()
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    written = io.StringIO()
    view = progress.ProgressView(run, steps=STEPS, plan=resolve(Config(), 1), console=Console(file=written, width=200))
    at = {"line": "train.py:50 step", "excess_ms": 22.0}
    with view:
        report(events, "slow by 20 ms", excess_ms=20.0)
        report(events, "slow by 20 ms", severity="critical", excess_ms=20.0)
        report(events, "slow by 22 ms", severity="critical", **at)
        report(events, "slow by 50 ms", severity="critical", **at | {"excess_ms": 50.0})
        report(events, "Over: slow by 50 ms", status="ok")
        report(events, "slow by 21 ms", excess_ms=21.0)
        wait_for(lambda: "Again" in written.getvalue(), "the last sentence")
    assert written.getvalue().splitlines() == [
        "STRAGGLER  slow by 20 ms",
        "STRAGGLER  Rank 1: most stack samples are at train.py:50 step.",
        "STRAGGLER  Update: slow by 50 ms",
        "STRAGGLER  Over: slow by 50 ms",
        "STRAGGLER  Again: slow by 21 ms",
    ]


def report(
    events: EventWriter, summary: str, *, severity: str = "warning", status: str = "fired", **evidence: object
) -> None:
    events.write(
        "finding", id="straggler-0-r1", finding_kind="straggler", analyzer="straggler", finding_ranks=[1], first_step=1,
        last_step=None, cause="compute", advice="", cost_s=None, severity=severity, status=status, summary=summary,
        evidence=evidence,
    )  # fmt: skip


def test_the_time_of_a_bar_says_what_it_is() -> None:
    now = [0.0]
    bar = Progress(TimeLeftColumn(), get_time=lambda: now[0], auto_refresh=False)
    task = bar.add_task("", total=100)
    assert [TimeLeftColumn().render(one).plain for one in bar.tasks] == [""], "the speed is not known"
    for step in range(1, 41):
        now[0] += 1.0
        bar.update(task, completed=step)
    assert [TimeLeftColumn().render(one).plain for one in bar.tasks] == ["01:00 left"]


def screen(written: str) -> list[str]:
    """Lines that a terminal shows, for the sequences that rich writes."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


class Killed:
    """Stands for the ranks and for watch."""

    def kill(self) -> None:
        """Nothing runs."""


def test_a_stop_at_once_leaves_no_bar_below_its_last_lines(tmp_path: Path) -> None:
    """The process exits while the bar is drawn: the bar stood below the command that continues the run."""
    run, written = empty_run(tmp_path), io.StringIO()
    console = Console(file=written, width=100, height=24, force_terminal=True, color_system=None, _environ={})
    run.node_dir(0).mkdir(parents=True)
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    stop = supervise._Stop(run, Node(nproc=1), events, Killed(), Killed(), console)  # type: ignore[arg-type]
    with progress.ProgressView(run, steps=STEPS, plan=resolve(Config(), 1), console=console) as stop.view:
        wait_for(lambda: "starting" in written.getvalue(), "the bar")
        stop.end_at_once(signal.SIGINT, "SIGINT was received again.")
        shown = screen(written.getvalue())
    assert shown[-1].startswith("To continue: rankscope train --resume ")
    assert not [line for line in shown if "starting" in line]


def test_the_table_follows_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For up to 15 s, each rank was "running" below the line that one had ended."""
    readings: list[None] = []
    monkeypatch.setattr(progress.LiveRanks, "_read", lambda self: readings.append(None))
    monkeypatch.setattr(progress, "REST_S", 0.01)
    monkeypatch.setattr(progress, "REST_PER_READING", 1e12)  # the rest after any reading is the longest
    monkeypatch.setattr(progress, "MAX_REST_S", 3600.0)
    ranks = progress.LiveRanks(make_run(tmp_path, ranks=1, steps=2))
    ranks.begin()
    try:
        wait_for(lambda: len(readings) == 1, "the first table")
        ranks.note_event()
        wait_for(lambda: len(readings) == 2 + progress.READINGS_AFTER_EVENT, "tables after the event")
    finally:
        ranks.end()


def test_a_table_from_before_the_first_step_is_not_shown_after_it(tmp_path: Path) -> None:
    """For up to 15 s, "the first step is still running" stood below the bar of step 160."""
    run = make_run(tmp_path, ranks=2, steps=20, hang={1: 10})
    ranks = progress.LiveRanks(run)
    ranks._drawn = ("starting", (0, False))
    assert ranks.table() == "starting"
    ranks.note_step(0)
    assert ranks.table() is None
    ranks.begin()
    try:
        wait_for(lambda: ranks.table() is not None, "a table with steps", deadline_s=60)
        ranks._drawn = ("attempt 1 is starting", (1, False))
        ranks.note_step(0)
        assert ranks.table() is not None
        ranks.note_step(1)
        assert ranks.table() is None
    finally:
        ranks.end()
