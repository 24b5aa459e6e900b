"""`rankscope top`: the ranks of a run in the terminal, those in trouble first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.process_end.pressed_keys import pressed_keys
from rankscope.terminal import LONGEST_S, FormatOption, RunArgument, console, fail, print_json, wants_json

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from analyzers.report.terminal.ranks_now import RankScreen
    from probes.tape.rundir import RunDir

__all__ = ["EPILOG", "top"]

EPILOG = (
    "\b\nExamples:\nrankscope top runs/latest\nrankscope top runs/latest --once\n"
    "ssh -t node-1 rankscope top /data/runs/latest"
)
LINES_IN_A_PIPE = 72


def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print the table once; the default without a terminal.")] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", min=0.2, max=LONGEST_S, help="Seconds between two refreshes.")
    ] = 1.0,
    output: FormatOption = "text",
) -> None:
    """Show every rank of a run, those in trouble first: state, step, own work, waiting, and what it is doing now.

    Own work and waiting are medians of the newest 50 steps. The column "for" shows the time since the rank's newest
    record. If the screen is too small, ranks in trouble keep their rows and the others are grouped by what they do. It
    ends with q, Ctrl-C or the run's end. For a run that has ended, medians cover all steps, and the findings are those
    of `rankscope analyze`. JSON is printed once.
    """
    as_json = wants_json(output)
    from analyzers.report.json import plain
    from analyzers.report.terminal.ranks_now import read_ranks
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError

    screen = console()
    try:
        folder = RunDir.open(run)
        if as_json:
            print_json(plain(read_ranks(folder, now_ns=time.time_ns()).to_json()))
        elif once or not screen.is_terminal:
            screen.print(_rank_screen(folder, screen, run).table, soft_wrap=not screen.is_terminal)
        else:
            _follow(folder, screen, run, every_s)
    except (RunError, StoreError) as error:
        fail(str(error))


def _follow(folder: RunDir, screen: Console, name: Path, every_s: float) -> None:
    """Redraw until Ctrl-C or the end of the run, and leave the last table on the terminal."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    keys = Text("Press q to quit.", style="dim")
    with screen.status("Reading the run…"):  # reading takes minutes for a run with many ranks that has ended
        drawn = _rank_screen(folder, screen, name)
    try:
        with (
            Live(Group(drawn.table, keys), console=screen, screen=True, auto_refresh=False) as live,
            pressed_keys() as asks_to_leave,
        ):
            while not drawn.has_ended and not asks_to_leave(every_s):
                drawn = _rank_screen(folder, screen, name)
                live.update(Group(drawn.table, keys), refresh=True)
    finally:
        screen.print(drawn.table)


def _rank_screen(folder: RunDir, screen: Console, name: Path) -> RankScreen:
    from analyzers.report.terminal.ranks_now import draw_ranks

    height = screen.height - 1 if screen.is_terminal else LINES_IN_A_PIPE
    return draw_ranks(folder, name=str(name), height=height, now_ns=time.time_ns(), width=screen.width)
