"""`rankscope top`: the ranks of a run in the terminal, those in trouble first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.terminal import RunArgument, console, fail

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rich.console import Console, RenderableType

    from analyzers.finding import Finding
    from probes.tape.rundir import RunDir

__all__ = ["EPILOG", "top"]

EPILOG = (
    "\b\nExamples:\nrankscope top runs/latest\nrankscope top runs/latest --once\n"
    "ssh -t node-1 rankscope top /data/runs/latest"
)
MAX_FINDINGS = 4
ROWS_IN_A_PIPE = 64


def top(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print the table once. Default where no terminal is.")] = False,
    every_s: Annotated[float, typer.Option("--every-s", min=0.2, help="Seconds between two refreshes.")] = 1.0,
) -> None:
    """Show every rank of a run, those in trouble first: state, step, own work, waiting, and what it is doing now.

    Own work and waiting are medians of the last 20 steps. "for" is the time since the rank's newest record. Where the
    ranks do not fit on the screen, those in trouble keep their rows and the others are folded by what they do. Of a run
    that has ended, the findings are those of `rankscope analyze`. Ctrl-C ends it.
    """
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError

    screen = console()
    try:
        folder = RunDir.open(run)
        if once or not screen.is_terminal:
            screen.print(_screen(folder, screen, run)[0], soft_wrap=True)
        else:
            _follow(folder, screen, run, every_s)
    except (RunError, StoreError) as error:
        fail(str(error))


def _follow(folder: RunDir, screen: Console, name: Path, every_s: float) -> None:
    """Redraw until Ctrl-C. A run that has ended is read again only if something was added to it."""
    from rich.live import Live

    drawn, is_live = _screen(folder, screen, name)
    version = _version(folder)
    try:
        with Live(drawn, console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                if is_live or version != _version(folder):
                    version = _version(folder)
                    drawn, is_live = _screen(folder, screen, name)
                live.update(drawn, refresh=True)
    except KeyboardInterrupt:
        screen.print(drawn)


def _version(folder: RunDir) -> list[tuple[int, int]]:
    """Changes when a record is added to the store."""
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in folder.stores()]


def _screen(folder: RunDir, screen: Console, name: Path) -> tuple[RenderableType, bool]:
    """Read the run and draw it; also whether it may go on."""
    from analyzers.report.rank_rows import rank_rows
    from analyzers.report.terminal.rank_table import Heading, rank_table
    from analyzers.run.policy import stall_policy
    from analyzers.run.setting import number
    from analyzers.run.state import run_state
    from store import Store, is_watched

    manifest = folder.manifest()
    watched = is_watched(folder.stores())
    with Store.open(folder) as store:
        now_ns = time.time_ns()
        state = run_state(store, stall_policy(manifest), now_ns=now_ns, is_watched=watched)
        findings = _findings(store, state.attempt) if state.is_live else _diagnosed(store, folder, manifest)
        found = rank_rows(store, findings, now_ns=now_ns if state.is_live else (state.last_ns or now_ns))
    steps = number(manifest, "train.steps")
    sentences: list[tuple[str, str]] = [(finding.severity, finding.summary) for finding in findings[:MAX_FINDINGS]]
    if len(findings) > MAX_FINDINGS:
        sentences.append(("", f"{len(findings) - MAX_FINDINGS} more findings: rankscope analyze {name}"))
    heading = Heading(
        run=str(name),
        state=state.word,
        reason=state.reason,
        planned_steps=int(steps) if steps else None,
        findings=sentences,
    )
    used = 6 + len(sentences) + bool(state.reason)
    max_rows = max(4, screen.height - used) if screen.is_terminal else ROWS_IN_A_PIPE
    return rank_table(found, heading, max_rows=max_rows), state.is_live


def _findings(store: Store, attempt: int | None) -> list[Finding]:
    """Open findings that `watch` reported, the worst first."""
    from analyzers.finding import SEVERITIES
    from analyzers.run.open_findings import newest_reports, reported_findings, why_closed

    reports = newest_reports(reported_findings(store))
    found = [one for one in reports if one.status in ("fired", "suspect") and not why_closed(one, attempt)]
    return sorted(found, key=lambda one: (SEVERITIES.index(one.severity), one.status == "suspect"))


def _diagnosed(store: Store, folder: RunDir, manifest: Mapping[str, Any]) -> list[Finding]:
    """Findings of a run that has ended, as `rankscope analyze` names them."""
    from analyzers.diagnose import diagnose

    return list(diagnose(store, manifest, stacks_dir=folder.stacks).fired)


if TYPE_CHECKING:
    from store import Store
