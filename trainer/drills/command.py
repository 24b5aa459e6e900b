"""`rankscope drill` after its arguments are parsed: run, show progress, write the results, set the exit code.

    exit_code = run_drill(base, plan, runs=Path("runs"), output="json", html=None, keep=False, limit_s=180.0)

Ctrl-C ends the current run and prints the table of completed runs.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from analyzers.report.terminal.safe_console import SafeConsole
from trainer.drills.drill import Drill
from trainer.drills.execute import Base
from trainer.drills.scenario import DrillPlan
from trainer.drills.table import DrillView, print_result
from trainer.drills.tally import Tally
from trainer.exit_codes import EXIT_FAILED

__all__ = ["drill_page", "run_drill"]

_INTERRUPTED = 130
_PLAIN_WIDTH = 130


def run_drill(
    base: Base, plan: DrillPlan, *, runs: Path, output: str, html: Path | None, keep: bool, limit_s: float
) -> int:
    """Run the drill. Returns 0 if every fault was found and every run recovered, 1 if not, and 130 if the drill was
    interrupted.
    """
    # background jobs of a shell script start with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = _console(to_stderr=output == "json")
    folder = (runs / time.strftime("drill-%Y%m%d-%H%M%S")).resolve()
    drill = Drill(base, plan, folder=folder, keep=keep, limit_s=limit_s)
    interrupted = False
    try:
        with DrillView(plan, console) as view:
            for _ in drill.rows(view):
                pass
    except KeyboardInterrupt:
        interrupted = True
    print_result(drill.tally, plan, console, interrupted=interrupted)
    if output == "json":
        sys.stdout.write(json.dumps(drill.tally.to_json(), indent=2) + "\n")
    if html is not None:
        title = str(base.config or "the defaults")
        html.write_text(drill_page(drill.tally, plan, title=title, interrupted=interrupted), encoding="utf-8")
        console.print(f"page: {html}", highlight=False, soft_wrap=True)
    if interrupted:
        return _INTERRUPTED
    return EXIT_FAILED if drill.tally.failed else 0


def _console(*, to_stderr: bool) -> Console:
    console = SafeConsole(stderr=to_stderr)
    return console if console.is_terminal else SafeConsole(width=_PLAIN_WIDTH, no_color=True, stderr=to_stderr)


def drill_page(tally: Tally, plan: DrillPlan, *, title: str, interrupted: bool = False) -> str:
    """Return the HTML page of the drill.

    All text that comes from a run (names, messages) is escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["share"] = lambda value: "-" if value is None else f"{100 * value:.1f} %"
    environment.filters["seconds"] = lambda value: "-" if value is None else f"{value:.1f} s"
    template = environment.get_template("page.html.j2")
    return template.render(tally=tally, plan=plan, title=title, interrupted=interrupted)
