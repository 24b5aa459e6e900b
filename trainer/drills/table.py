"""Show a drill on a terminal as a table that grows during the drill, and its totals. Without a terminal, print lines.

with DrillView(plan, console) as view:
    for row in drill.rows(view): ...
print_result(drill.tally, plan, console)
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from analyzers.wording import counted
from probes.tape.typed_path import analyze_command
from trainer.drills.scenario import DrillPlan, Scenario
from trainer.drills.tally import Row, Tally
from trainer.faults.catalogue import CATALOGUE, NOT_DRILLED

__all__ = ["DrillView", "print_faults", "print_result"]

YES, NO, NONE = "[green]yes[/]", "[bold red]no[/]", "[dim]-[/]"


class DrillView:
    """Shows a drill between `__enter__` and `__exit__`."""

    def __init__(self, plan: DrillPlan, console: Console) -> None:
        self.plan = plan
        self.console = console
        self._tally = Tally()
        self._status = ""
        self._line = ""
        self._began = self._run_began = time.monotonic()
        self._number = 0
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def __enter__(self) -> DrillView:
        if self.console.is_terminal:
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.console.is_terminal:
            self._live.__exit__(kind, error, at)

    def run_started(self, number: int, scenario: Scenario) -> None:
        self._number, self._run_began, self._line = number, time.monotonic(), ""
        texts = ", ".join(fault.text for fault in scenario.faults) or scenario.what
        self._status = f"{scenario.label} on {scenario.mesh}: {texts}"
        if not self.console.is_terminal:
            self.console.print(
                f"{number + 1}/{len(self.plan.scenarios)}  {self._status}", highlight=False, markup=False
            )

    def run_printed(self, line: str) -> None:
        self._line = line

    def run_ended(self, row: Row) -> None:
        self._tally.add(row)
        if not self.console.is_terminal:
            words = "ok" if row.passed else "; ".join(row.problems)
            self.console.print(f"      {row.wall_s:.0f} s  {words}", highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> Group:
        total, done, now = len(self.plan.scenarios), self._number, time.monotonic()
        remaining = f", about {(now - self._began) / done * (total - done) / 60:.0f} min left" if done else ""
        head = f" {done + 1}/{total}  {self._status}  {now - self._run_began:.0f} s{remaining}"
        self._spinner.update(text=Text(head, overflow="ellipsis", no_wrap=True))
        # The terminal echoes ^C after the last line. In a full line it would begin another, which is not erased.
        last = Text("     " + self._line, style="dim", no_wrap=True)
        last.truncate(max(1, self.console.width - len("^C^C")), overflow="ellipsis")
        parts: list[RenderableType] = [self._spinner, last]
        # Show only as many of the newest rows as fit on the terminal. The whole table is printed at the end.
        newest = Tally(self._tally.rows[-max(3, self.console.height - 8) :])
        return Group(result_table(newest), *parts) if newest.rows else Group(*parts)


def result_table(tally: Tally) -> Table:
    """One row per run."""
    meshes = len({row.scenario.mesh for row in tally.rows}) > 1
    seeds = len({row.scenario.seed for row in tally.rows}) > 1
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("fault", max_width=32, overflow="fold")
    if meshes:
        table.add_column("mesh", no_wrap=True)
    if seeds:
        table.add_column("seed", justify="right")
    table.add_column("what happens", min_width=24, max_width=44)
    for title in ("seen", "rank", "cause"):
        table.add_column(title, no_wrap=True)
    for title in ("finding", "training", "lost"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("recovered", no_wrap=True)
    for row in tally.rows:
        where = [row.scenario.mesh] if meshes else []
        where += [str(row.scenario.seed)] if seeds else []
        table.add_row(escape(row.scenario.label), *where, escape(row.scenario.what), *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    score = row.score
    if row.problem or not score.injected:
        return [NONE, NONE, NONE, NONE, NONE, NONE, NO]
    live = all(answer.seen == "live" for answer in score.answers)
    if not score.answers:
        cells = [
            f"[bold red]{len(score.false_alarms)} false[/]" if score.false_alarms else "[green]silent[/]",
            NONE,
            NONE,
        ]
    else:
        seen = (YES if live else "[yellow]after[/]") if row.seen else NO
        seen += f" [red]+{len(score.false_alarms)}[/]" if score.false_alarms else ""
        cells = [seen, _mark(row.right_rank, row), _mark(row.right_cause, row)]
    lost = str(score.steps_lost) if score.steps_lost else NONE
    return [*cells, _seconds(row.finding_s), _seconds(score.training_s), lost, YES if score.recovered else NO]


def _mark(right: bool, row: Row) -> str:
    return (YES if right else NO) if row.seen else NONE


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f} s"


def print_result(tally: Tally, plan: DrillPlan, console: Console, *, interrupted: bool = False) -> None:
    """Print the whole table, the problems, what could not be run, and the totals."""
    if tally.rows:
        console.print(result_table(tally), highlight=False)
    bad = [row for row in tally.rows if not row.passed]
    if bad:
        console.print()
        for row in bad:
            console.print(f"[bold]{escape(row.scenario.label)}[/] on {row.scenario.mesh}", highlight=False)
            for line in row.problems:
                console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
            if row.run is not None:
                console.print(f"  {escape(analyze_command(row.run))}", highlight=False, soft_wrap=True)
    skipped: dict[str, list[str]] = {}
    for name, mesh, reason in plan.skipped:
        skipped.setdefault(f"{name}: {reason}", []).append(mesh)
    if skipped:
        console.print()
        for text, meshes in skipped.items():
            console.print(f"[dim]Skipped on {', '.join(meshes)}: {escape(text)}.[/]", highlight=False)
    console.print()
    if interrupted:
        console.print(f"Interrupted after {len(tally.rows)} of {counted(len(plan.scenarios), 'run')}.", highlight=False)
    console.print(totals(tally), highlight=False)


def totals(tally: Tally) -> str:
    """The last lines of a drill."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    seconds = [
        f"{name} {value:.1f} s"
        for name, value in (("to a finding", tally.finding_s), ("to training again", tally.training_s))
        if value is not None
    ]
    runs = counted(len(tally.rows), "run") or "0 runs"
    findings = counted(sum(len(row.score.answers) for row in tally.rows), "finding") or "0 findings"
    return (
        f"[bold]{runs}, {findings} expected[/]   recall {share(tally.recall)}   precision "
        f"{share(tally.precision)}   right rank {share(tally.right_rank)}   right cause {share(tally.right_cause)}\n"
        f"unrecovered {tally.unrecovered}   goodput {share(tally.goodput)}"
        + (f"   median {', '.join(seconds)}" if seconds else "")
    )


def print_faults(console: Console) -> None:
    """Print `rankscope drill --list`: what happens, the required finding and the required response."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for title in ("fault", "kind", "what happens", "expected finding", "expected recovery"):
        table.add_column(title, no_wrap=title in ("fault", "kind"))
    follows = {
        "goes_on": "training continues",
        "skips": "step refused, rollback",
        "restarts": "restart",
        "stops": "stop with a report",
    }
    for name, kind in CATALOGUE.items():
        found = "; ".join(expected.text for expected in kind.expected) or "none: no rank is at fault"
        follow = follows[kind.recovery]
        found += f"; event {' '.join(filter(None, kind.required_event))}" if kind.required_event[0] else ""
        table.add_row(kind.fault_id, name, escape(kind.what), escape(found), follow)
    console.print(table, highlight=False)
    console.print("\nNot drilled:", highlight=False)
    for number, reason in NOT_DRILLED.items():
        console.print(f"  {number:9} {escape(reason)}", highlight=False, soft_wrap=True)
