"""`rankscope top`: which ranks come first, what the table says of them, and how many it folds."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from analyzers.figures.ranks.rank_step import MEASURES
from analyzers.finding import Finding
from analyzers.report.rank_rows import RankRow, RankRows, rank_rows
from analyzers.report.terminal.rank_table import Heading, fold, rank_table
from analyzers.report.terminal.ranks_now import draw_ranks, read_ranks
from analyzers.run.findings.past_tense import OVER
from analyzers.run.live.folder_state import folder_state
from analyzers.run.live.state import run_state
from analyzers.run.policy import StallPolicy
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from rankscope.cli import app
from rankscope.commands.top import top
from store import Ingester, Store
from tests.factories import RankWriter, empty_run, make_run, still_training
from tests.waiting import wait_for
from trainer.launcher.terminal.progress import LiveRanks


def drawn(found: RankRows, *, max_rows: int, width: int = 140) -> str:
    console = Console(width=width, no_color=True, record=True, file=StringIO())
    console.print(rank_table(found, Heading(run="runs/x", state="training"), max_rows=max_rows))
    return console.export_text()


def test_the_rank_that_hangs_comes_first(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, hang={2: 20})
    hang = Finding(
        kind="hang",
        severity="critical",
        status="fired",
        analyzer="hangs",
        ranks=(2,),
        attempt=0,
        summary="Rank 2 hangs.",
    )
    with Store.open(run) as store:
        found = rank_rows(store, [hang], now_ns=time.time_ns())
    assert found.rows[0].rank == 2
    assert found.rows[0].finding == "hang"
    others = found.rows[1:]
    assert all("all_reduce" in row.doing for row in others), [row.doing for row in others]
    assert "all_reduce" not in found.rows[0].doing
    assert found.rows[0].own_ms is not None
    assert found.rows[0].own_ms > 0
    text = drawn(found, max_rows=10)
    assert re.search(r"^ *2 +running", text, flags=re.MULTILINE), text


def test_ranks_that_do_not_fit_are_folded(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=16, steps=5)
    with Store.open(run) as store:
        found = rank_rows(store, [], now_ns=time.time_ns())
    text = drawn(found, max_rows=5)
    assert "12 more" in text
    assert "ranks 4-15" in text, text
    assert len([line for line in text.splitlines() if re.match(r" *\d+ +(running|ended)", line)]) == 4


def test_of_many_ranks_those_in_trouble_keep_their_rows_and_the_others_are_folded_by_activity() -> None:
    rows = [RankRow(rank=7, state="running", step=9, doing="forward", doing_s=9.0, finding="hang", severity="critical")]
    rows += [RankRow(rank=rank, state="running", step=9, doing=f"recv #{rank} from rank {rank + 1}", doing_s=8.0)
             for rank in range(100, 300)]  # fmt: skip
    rows += [RankRow(rank=rank, state="running", step=9, doing="all_reduce #4 of world", doing_s=8.0)
             for rank in range(300, 500)]  # fmt: skip
    text = drawn(RankRows(attempt=0, step=9, step_ms=5.0, rows=tuple(rows)), max_rows=12)
    lines = [line.strip() for line in text.splitlines() if "running" in line]
    assert [line.split()[0] for line in lines] == ["7", "200", "200"]
    assert "ranks 100-299" in lines[1], lines
    assert "ranks 100-299  recv … from rank …" in lines[1], lines
    assert "ranks 300-499  all_reduce #4 of world" in lines[2], lines
    assert "ranks 300-499" in lines[2]
    assert "hang" in lines[0].lower()


def test_ranks_that_do_the_same_are_folded_by_host() -> None:
    rows = tuple(RankRow(rank=rank, state="ended", step=9, host=f"node-{rank // 8}") for rank in range(64))
    text = drawn(RankRows(attempt=0, step=9, step_ms=5.0, rows=rows), max_rows=10)
    assert "ranks 56-63  node-7" in text, text
    assert len([line for line in text.splitlines() if "8 ranks" in line]) == 8


@pytest.mark.parametrize(("width", "left_out"), [(80, "3 columns do not fit: memory, waiting, own work."), (120, "")])
def test_a_terminal_shows_whole_columns_and_names_those_left_out(width: int, left_out: str) -> None:
    row = RankRow(
        rank=1, state="running", step=60, own_ms=10.3, waiting_ms=1.7, memory_bytes=698 << 20, doing_s=49.0,
        doing="all_reduce #124 (group world:0-1) for 49 s and 1 more", finding="straggler", severity="critical",
    )  # fmt: skip
    written = StringIO()
    console = Console(width=width, no_color=True, force_terminal=True, file=written)
    found = RankRows(attempt=0, step=61, step_ms=15.0, rows=(row,))
    console.print(rank_table(found, Heading(run="runs/x", state="stalled"), max_rows=9))
    lines = [line.rstrip() for line in Text.from_ansi(written.getvalue()).plain.splitlines()]
    assert all(len(line) <= width for line in lines)
    (drawn_row,) = (line for line in lines if "running" in line)
    assert "all_reduce #124 (world:0-1)" in drawn_row
    assert drawn_row.endswith("straggler")
    assert [line for line in lines if "not fit" in line] == ([left_out] if left_out else [])


def test_eighty_columns_show_a_straggler_and_the_whole_call_that_waits_for_it() -> None:
    rows = [
        RankRow(rank=1, state="running", step=62, own_ms=8550.0, waiting_ms=56.6, memory_bytes=474 << 20,
                doing="backward", finding="straggler", severity="critical"),
        RankRow(rank=0, state="running", step=62, own_ms=3290.0, waiting_ms=5330.0, memory_bytes=481 << 20,
                doing="all_reduce #149 (group world:0-1)"),
    ]  # fmt: skip
    written = StringIO()
    console = Console(width=80, no_color=True, force_terminal=True, file=written)
    found = RankRows(attempt=0, step=62, step_ms=8534.0, rows=tuple(rows))
    console.print(rank_table(found, Heading(run="runs/x", state="training"), max_rows=9))
    text = Text.from_ansi(written.getvalue()).plain
    assert "…" not in text
    for value in ("8.55 s", "all_reduce #149 (world:0-1)", "straggler", "do not fit: memory, waiting."):
        assert value in text


@pytest.mark.parametrize("width", range(60, 100))
def test_an_activity_without_room_is_cut_between_words(width: int) -> None:
    doing = "all_reduce #2256 (group world:0-3) and 1 more"
    row = RankRow(rank=0, state="stalled", step=1127, own_ms=33.3, doing=doing, doing_s=14.0, finding="hang")
    written = StringIO()
    console = Console(width=width, no_color=True, force_terminal=True, file=written)
    found = RankRows(attempt=0, step=1127, step_ms=89.9, rows=(row,))
    console.print(rank_table(found, Heading(run="runs/x", state="stalled"), max_rows=9))
    text = Text.from_ansi(written.getvalue()).plain
    (cut,) = re.findall(r"all_reduce .*?(?=  )", text)
    assert cut.removesuffix(" …") in [doing.replace("group ", "").rsplit(" ", count)[0] for count in range(5)] + [
        doing.replace("group ", "")
    ]


@pytest.mark.parametrize(
    ("state", "colour"), [("training", "green"), ("given up", "red"), ("recovering", "yellow"), ("interrupted", "")]
)
def test_only_a_run_that_goes_well_is_green(state: str, colour: str) -> None:
    found = RankRows(attempt=0, step=9, step_ms=5.0, rows=())
    written = StringIO()
    Console(width=80, force_terminal=True, color_system="standard", file=written).print(
        rank_table(found, Heading(run="runs/x", state=state), max_rows=9)
    )
    codes = {"green": "32", "red": "31", "yellow": "33"}
    coloured = [name for name, code in codes.items() if f"{code}m  {state}" in written.getvalue()]
    assert coloured == ([colour] if colour else [])


def test_a_finding_that_many_ranks_share_is_one_row() -> None:
    rows = [RankRow(rank=0, state="ended", step=9, finding="straggler", severity="warning")]
    rows += [RankRow(rank=rank, state="ended", step=9, finding="stage_imbalance") for rank in range(1, 33)]
    rows += [RankRow(rank=rank, state="ended", step=9) for rank in range(33, 65)]
    text = drawn(RankRows(attempt=0, step=9, step_ms=5.0, rows=tuple(rows)), max_rows=20)
    lines = [" ".join(line.split()) for line in text.splitlines() if "ended" in line]
    assert lines == [
        "0 ended 9 straggler", "32 ranks ended 9 ranks 1-32 stage imbalance", "32 ranks ended 9 ranks 33-64",
    ]  # fmt: skip


def test_more_ranks_in_trouble_than_rows_are_folded_too() -> None:
    rows = [RankRow(rank=rank, state="dead", step=9) for rank in range(40)]
    rows += [RankRow(rank=40 + rank, state="running", step=9, doing=f"phase {'ab'[rank % 2]}") for rank in range(40)]
    shown, groups = fold(RankRows(attempt=0, step=9, step_ms=5.0, rows=tuple(rows)), 10)
    assert len(shown) + len(groups) <= 10
    assert sum(map(len, groups)) + len(shown) == 80


def test_a_run_that_has_ended_shows_the_findings_of_its_diagnosis(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=60, slow={3: 1.6}, phase="forward")
    done = CliRunner().invoke(app, ["top", str(run.path)])
    assert done.exit_code == 0, done.output
    assert "Rank 3 was slow" in done.output
    table = done.output[done.output.index("own work") :]
    assert re.search(r"^ *3 +ended.*straggler", table, flags=re.MULTILINE), table


def test_what_is_over_comes_after_what_still_lasts_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=120, slow={3: 1.6}, slow_from=60, phase="forward", spikes={50: 9.0})
    now = read_ranks(run, now_ns=time.time_ns())
    assert [finding.kind for finding in now.findings] == ["straggler", "loss_spike"]
    closed = [finding["closed"] for finding in now.to_json()["findings"]]
    assert closed == ["", "over"]
    screen = draw_ranks(run, name="runs/x", height=30, now_ns=time.time_ns())
    console = Console(width=200, no_color=True, record=True, file=StringIO())
    console.print(screen.table)
    lines = console.export_text().splitlines()
    slow = next(place for place, line in enumerate(lines) if line.startswith("Rank 3 was slow"))
    assert lines[slow + 1].startswith("Already over: Loss rose from")


def test_a_rank_with_a_past_finding_comes_after_one_with_an_open_finding(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=120, slow={3: 1.6}, slow_from=60, phase="forward", nan={1: 30})
    screen = draw_ranks(run, name="runs/x", height=30, now_ns=time.time_ns())
    console = Console(width=200, no_color=True, record=True, file=StringIO())
    console.print(screen.table)
    rows = re.findall(r"^ *(\d) +ended .*?([a-z, -]*)$", console.export_text(), flags=re.MULTILINE)
    assert [(rank, text.strip()) for rank, text in rows[:2]] == [("3", "straggler"), ("1", "non-finite, over")]


def reported(run: RunDir, *findings: Finding) -> None:
    """Record findings as `watch` does."""
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    for finding in findings:
        columns = finding.to_json()
        events.write("finding", finding_kind=columns.pop("kind"), finding_ranks=columns.pop("ranks"), **columns)
    events.close()


def test_findings_of_a_live_run_are_in_the_order_of_its_report(tmp_path: Path) -> None:
    """A suspicion comes after what is certain, whatever its severity."""
    run = still_training(make_run(tmp_path, ranks=2, steps=20, end=""))
    for kind, severity, status in (("rank_lost", "critical", "suspect"), ("straggler", "warning", "fired")):
        found = Finding(
            kind=kind, severity=severity, status=status, analyzer="x", ranks=(1,), attempt=0, summary=f"A {kind}.",
        )  # fmt: skip
        reported(run, found)
    now = read_ranks(run, now_ns=time.time_ns())
    assert now.state.is_live
    assert [finding.kind for finding in now.findings] == ["straggler", "rank_lost"]


def test_a_live_run_shows_what_it_has_recovered_from_below_what_is_open(tmp_path: Path) -> None:
    run = still_training(make_run(tmp_path, ranks=4, steps=60, end="", nan={2: 40}))
    nan = Finding(
        kind="non_finite", severity="critical", status="fired", analyzer="numerics", ranks=(2,), attempt=0,
        first_step=40, summary="Loss became NaN in step 40.",
    )  # fmt: skip
    recovered = replace(nan, evidence={"restored_step": 30})
    slow = Finding(
        kind="straggler", severity="warning", status="fired", analyzer="straggler", ranks=(3,), attempt=0,
        first_step=20, summary="Rank 3 has been slow since step 20: +19 ms.",
    )  # fmt: skip
    ended = replace(recovered, status="ok", severity="info", summary=f"{OVER}{recovered.summary}")
    stuck = Finding(
        kind="hang", severity="critical", status="ok", analyzer="hangs", ranks=(1,), attempt=0, first_step=9,
        summary=f"{OVER}Rank 1 was stuck for 9.0 s.",
    )  # fmt: skip
    reported(run, stuck, nan, slow, ended)

    now = read_ranks(run, now_ns=time.time_ns())
    assert [(one["kind"], one["closed"]) for one in now.to_json()["findings"]] == [
        ("straggler", ""), ("non_finite", "over"), ("hang", "over"),
    ]  # fmt: skip
    text = screen_text(run)
    assert re.search(
        "Rank 3 has been slow since step 20: .*\nAlready over: Loss became NaN .*\nAlready over: Rank 1 was stuck",
        text,
    ), text
    assert re.search(r"^ *2 +running .*non-finite, over *$", text, flags=re.MULTILINE), text


def test_an_attempt_that_failed_is_told_while_the_next_one_trains(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=20, end="")
    lost = Finding(
        kind="rank_lost", severity="critical", status="fired", analyzer="rank_lost", ranks=(1,), attempt=0,
        summary="Rank 1 was killed by SIGKILL in step 20.",
    )  # fmt: skip
    reported(run, lost)
    make_run(tmp_path, ranks=2, steps=10, end="", run=run, attempt=1)
    still_training(run)
    now = read_ranks(run, now_ns=time.time_ns())
    assert now.state.is_live
    assert now.to_json()["findings"][0]["closed"] == "the run continued as attempt 1"
    assert "Already over: Rank 1 was killed by SIGKILL in step 20." in screen_text(run)


def screen_text(run: RunDir) -> str:
    console = Console(width=200, no_color=True, record=True, file=StringIO())
    console.print(draw_ranks(run, name="runs/x", height=30, now_ns=time.time_ns()).table)
    return console.export_text()


def test_ranks_that_were_killed_do_not_run_once_the_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, hang={2: 20})
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    events.write("run_ended", attempt=0, reason="interrupted", exit_code=130)
    events.close()
    done = CliRunner().invoke(app, ["top", str(run.path)])
    assert done.exit_code == 0, done.output
    assert "running" not in done.output
    table = done.output[done.output.index("own work") :]
    assert re.search(r"^ *2 +ended .*backward", table, flags=re.MULTILINE), table
    assert re.search(r"^ *0 +ended .*all_reduce", table, flags=re.MULTILINE), "what it did last"


def test_a_run_without_records_may_begin_until_its_launcher_has_ended(tmp_path: Path) -> None:
    run = empty_run(tmp_path, world_size=2)
    screen = draw_ranks(run, name="runs/x", height=20, now_ns=time.time_ns())
    assert not screen.has_ended, "`top` that was started together with the run goes on"
    console = Console(width=100, no_color=True, record=True, file=StringIO())
    console.print(screen.table)
    assert console.export_text().lower().count("no rank has written a record yet") == 1
    run.node_dir(0).mkdir(parents=True)
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    events.write("run_ended", attempt=0, reason="failed", exit_code=1)
    events.close()
    screen = draw_ranks(run, name="runs/x", height=20, now_ns=time.time_ns())
    assert screen.has_ended
    console.print(screen.table)
    assert "failed" in console.export_text()


def test_a_run_that_stands_still_has_no_running_rank_and_one_duration(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=200, step_ms=200, hang={1: 200})
    hang = Finding(
        kind="hang", severity="critical", status="fired", analyzer="hangs", ranks=(1,), attempt=0,
        summary="Rank 1 hangs. Rank 0 waited for 5.4 s.", evidence={"silent_s": 5.4},
    )  # fmt: skip
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    columns = hang.to_json()
    events.write("finding", finding_kind=columns.pop("kind"), finding_ranks=columns.pop("ranks"), **columns)
    events.close()
    with Ingester(run, role="watch") as watch:
        while watch.tick().lag:
            pass
        with Store.open(run, catch_up=False) as store:
            newest_ns = folder_state(run, store, StallPolicy(), now_ns=time.time_ns()).last_ns
        assert newest_ns is not None
        watch.mark_ingested(newest_ns + 3600 * 10**9)
        screen = draw_ranks(run, name="runs/x", height=20, now_ns=newest_ns + 3600 * 10**9)
    assert screen.is_live
    console = Console(width=140, no_color=True, record=True, file=StringIO())
    console.print(screen.table)
    text = console.export_text()
    assert "running" not in text
    assert len(re.findall(r"^ *[01] +stalled", text, flags=re.MULTILINE)) == 2, text
    (waited_s,) = map(float, re.findall(r"Rank 0 waited for ([\d.]+) s so far", text))
    assert waited_s > 5.4
    assert f" {int(waited_s)} s " in text[text.index("own work") :], "as the column of the rank"


def test_sentences_that_break_leave_the_heading_on_the_screen(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=16, steps=60, slow={3: 1.5}, phase="forward")
    screen = draw_ranks(run, name=f"runs/{'x' * 60}", height=16, now_ns=time.time_ns(), width=60)
    console = Console(width=60, no_color=True, record=True, file=StringIO())
    console.print(screen.table)
    lines = console.export_text().rstrip("\n").splitlines()
    assert "Rank 3 was slow" in "\n".join(lines[:6])
    assert len(lines) <= 16, lines


def test_times_of_a_run_that_has_ended_are_those_of_all_its_steps(tmp_path: Path) -> None:
    """As the median step above them: the newest 50 steps alone may add up to more than it."""
    run = make_run(tmp_path, ranks=2, steps=200, slow={1: 3.0}, slow_from=160)
    now = read_ranks(run, now_ns=time.time_ns())
    row = next(row for row in now.ranks.rows if row.rank == 1)
    with Store.open(run) as store:
        ((own_ms,),) = store.rows(f"SELECT median({MEASURES['own work'][0]}) FROM steps WHERE rank = 1")
        newest = rank_rows(store, [], now_ns=time.time_ns()).rows
    assert row.own_ms == own_ms
    assert row.own_ms is not None
    assert row.waiting_ms is not None
    assert now.ranks.step_ms is not None
    assert row.own_ms + row.waiting_ms < 1.05 * now.ranks.step_ms
    assert max(one.own_ms or 0.0 for one in newest) > 2 * own_ms, "so that the windows can be told apart"


def test_top_prints_once_into_a_pipe(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, slow={3: 1.5}, phase="forward")
    done = CliRunner().invoke(app, ["top", str(run.path)])
    assert done.exit_code == 0, done.output
    assert "4 ranks" in done.output
    assert "step 30" in done.output


@pytest.mark.parametrize("markup", ["[red]x[/red]", "\x1b[31mred"])
def test_text_of_the_run_has_no_effect(tmp_path: Path, markup: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run) as store:
        found = rank_rows(store, [], now_ns=time.time_ns())
    console = Console(width=100, no_color=True, record=True, file=StringIO())
    console.print(rank_table(found, Heading(run=markup, state="training"), max_rows=4))
    text = console.export_text()
    assert "red" in text
    assert "\x1b" not in text


def test_a_run_that_ended_before_its_first_step(tmp_path: Path) -> None:
    """It said "at step None", and "1 rank" of two."""
    run = empty_run(tmp_path, world_size=2)
    RankWriter(run, rank=0, ranks=2).close()
    console = Console(width=100, no_color=True, record=True, file=StringIO())
    console.print(draw_ranks(run, name="run", height=40, now_ns=time.time_ns()).table)
    assert "  1 of 2 ranks\n" in console.export_text()
    with Store.open(run) as store:
        state = run_state(store, StallPolicy(), now_ns=time.time_ns() + 3600 * 10**9, is_watched=False)
    assert (state.word, state.reason) == ("died", "its records end before the first step without a reason")


def test_train_shows_the_ranks_below_its_bar(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30, hang={2: 20})
    table = LiveRanks(run)
    table.begin()
    try:
        wait_for(lambda: table.table() is not None, "the table of ranks", deadline_s=60)
    finally:
        table.end()
    drawn = table.table()
    assert drawn is not None
    console = Console(width=140, no_color=True, record=True, file=StringIO())
    console.print(drawn)
    text = console.export_text()
    assert "own work" in text
    assert len(re.findall(r"^ *[0-3] +running", text, flags=re.MULTILINE)) == 4, text


def test_the_rank_of_an_open_finding_comes_before_one_that_is_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=4, steps=30)
    found = [
        Finding(kind=kind, severity="warning", status="fired", analyzer=kind, ranks=(rank,), attempt=0, summary="One.")
        for kind, rank in (("straggler", 3), ("non_finite", 2))  # the order of the report
    ]
    with Store.open(run) as store:
        rows = rank_rows(store, found, now_ns=time.time_ns()).rows
    assert [row.rank for row in rows] == [3, 2, 0, 1]


@pytest.mark.parametrize(("planned", "text"), [(200, "step 120 of 200 "), (100, "step 120 "), (None, "step 120 ")])
def test_a_run_beyond_its_planned_steps_does_not_name_them(planned: int | None, text: str) -> None:
    """Resumed with more steps, or driven by a loop of the user's own."""
    console = Console(width=80, no_color=True, record=True, file=StringIO())
    found = RankRows(attempt=0, step=120, step_ms=5.0, rows=())
    console.print(rank_table(found, Heading(run="runs/x", state="training", planned_steps=planned), max_rows=9))
    assert f"  {text} median step" in console.export_text()


def test_a_table_printed_once_on_a_terminal_breaks_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = StringIO()
    screen = Console(width=60, force_terminal=True, no_color=True, file=written)
    monkeypatch.setattr("rankscope.commands.top.console", lambda: screen)
    top(make_run(tmp_path, ranks=2, steps=9).path, once=True)
    lines = Text.from_ansi(written.getvalue()).plain.splitlines()
    assert all(len(line.rstrip()) <= 60 for line in lines), lines
    assert "median step" in " ".join(" ".join(lines).split())
