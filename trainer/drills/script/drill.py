"""`rankscope drill --script`: run a user's script once clean and once with each fault, and score each run.

    rows = list(script_drill(plan, ["kill", "slow_forward"], folder=Path("runs/drill-1"), keep=False))
    print_rows(rows, console)

The clean run comes first. It measures the step time, because the delay of a slowdown is a share of it. Any finding in
the clean run is a false alarm.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from analyzers.wording import counted
from probes.attach.injected_fault import InjectedFault
from probes.tape.typed_path import analyze_command
from trainer.drills.script.execute import Plan, execute
from trainer.drills.script.faults import SCRIPT_FAULTS
from trainer.drills.script.score import ScriptRow, median_step_s, score

__all__ = ["print_rows", "script_drill", "to_json"]

MIN_DELAY_S = 0.01
"""Minimum delay in seconds: the jitter of a busy machine is as large as shorter delays."""
_YES, _NO, _NOT_ASKED = "[green]yes[/]", "[bold red]no[/]", "[dim]-[/]"


def script_drill(
    plan: Plan, faults: Sequence[str], *, folder: Path, keep: bool, slow_ratio: float = 0.3
) -> Iterator[ScriptRow]:
    """Yield each scored run; faults strike rank 1. Runs without a problem are deleted unless `keep` is set."""
    done = execute(plan, (), folder / "none")
    clean = score(None, done)
    yield clean
    step_s = None if clean.problem else median_step_s(done)
    _remove(folder / "none", clean, keep)
    if step_s is None:
        return
    for name in faults:
        fault = InjectedFault(
            name=name, step=plan.step, rank=min(1, plan.num_ranks - 1),
            seconds=max(MIN_DELAY_S, slow_ratio * step_s), lasts=SCRIPT_FAULTS[name].lasts,
        )  # fmt: skip
        row = score(fault, execute(plan, [fault], folder / name))
        _remove(folder / name, row, keep)
        yield row


def _remove(folder: Path, row: ScriptRow, keep: bool) -> None:
    """Delete the run's folder if the run has no problem."""
    if row.is_right and not keep:
        shutil.rmtree(folder, ignore_errors=True)


def print_rows(rows: Sequence[ScriptRow], console: Console) -> None:
    """Print the table, the problems, and the totals."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for title in ("fault", "what happens", "seen", "rank", "cause", "place", "step", "finding", "line"):
        table.add_column(title, no_wrap=title not in ("what happens", "line"))
    for row in rows:
        if row.problem:
            seen = "[red]failed[/]"
        elif not row.is_injected:
            seen = "[dim]no place[/]"
        elif not SCRIPT_FAULTS[row.fault].kinds:
            seen = "[green]silent[/]" if not row.false_alarms else f"[red]{len(row.false_alarms)} false[/]"
        else:
            seen = f"[green]{row.seen}[/]" if row.seen else _NO
        time_text = "-" if row.finding_s is None else f"{row.finding_s:.1f} s"
        marks = map(_mark, (row.right_rank, row.right_cause, row.right_place, row.right_step))
        table.add_row(row.fault, escape(row.what), seen, *marks, time_text, escape(row.line))
    console.print(table, highlight=False)
    for row in rows:
        if row.is_right:
            continue
        console.print(f"\n[bold]{row.fault}[/]", highlight=False)
        texts = [row.problem, row.summary, *(f"False alarm: {text}" for text in row.false_alarms)]
        for text in filter(None, texts):
            console.print(f"  {escape(text)}", highlight=False, soft_wrap=True)
        console.print(f"  {escape(analyze_command(Path(row.run)))}", highlight=False, soft_wrap=True)
    expected = [row for row in rows if row.is_injected and SCRIPT_FAULTS[row.fault].kinds]
    right = sum(row.is_right for row in expected)
    alarms = counted(sum(len(row.false_alarms) for row in rows), "false alarm") or "0 false alarms"
    of_all = f"{right} of {counted(len(expected), 'fault') or '0 faults'}"
    console.print(f"\n{of_all} diagnosed correctly, {alarms}.", highlight=False)


def to_json(rows: Sequence[ScriptRow]) -> dict[str, Any]:
    """Return what `--format json` prints."""
    return {"schema_version": 1, "is_right": all(row.is_right for row in rows), "runs": [row.to_json() for row in rows]}


def _mark(value: bool | None) -> str:
    return _NOT_ASKED if value is None else _YES if value else _NO
