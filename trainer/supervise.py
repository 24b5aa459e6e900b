"""Everything around a run's ranks on the machine that was asked to train: watch, launch, progress, how it ended.

exit_code = supervise(run, config, plan=plan, faults=[], console=console)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import TYPE_CHECKING

from probes.rundir import RunDir
from trainer.config import Config
from trainer.mesh_plan import Plan
from trainer.progress import ProgressView
from trainer.recovery.watch_process import start_watch

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["supervise"]

WATCH_END_S = 15.0
"""How long the last ingestion may take before the run is reported without it (it is caught up by any reader)."""
WATCH_RESTART_S = 2.0


class _WatchKeeper:
    """Keeps a watch process running: it can be killed at any moment and loses nothing."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.process: subprocess.Popen[bytes] = start_watch(run.path)
        self._started_at = time.monotonic()
        self.ending = False

    def look(self) -> None:
        if self.ending or self.process.poll() is None or time.monotonic() - self._started_at < WATCH_RESTART_S:
            return
        self.process = start_watch(self.run.path)
        self._started_at = time.monotonic()

    def end(self) -> None:
        self.ending = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(WATCH_END_S)  # it leaves by itself once it has seen `run_ended`
            return
        self.process.kill()
        self.process.wait()


def supervise(run: RunDir, config: Config, *, plan: Plan, faults: list[str], console: Console) -> int:
    """Train to the end; returns the exit code of `rankscope train`."""
    os.environ["RANKSCOPE_CONFIG"] = config.model_dump_json()
    arguments = [text for fault in faults for text in ("--fault", fault)]
    keeper = _WatchKeeper(run)
    try:
        with ProgressView(run, steps=config.train.steps, plan=plan, console=console) as view:
            view.every_tick(keeper.look)
            from trainer.recovery.launch import launch  # imports torch: after the bar is on the screen

            restarts = config.recovery.max_restarts if config.recovery.enabled else 0
            outcome = launch(run, nproc_per_node=plan.world_size, max_restarts=restarts, worker_arguments=arguments)
            keeper.end()
    finally:
        keeper.end()
    restarted = f" after {outcome.attempts - 1} restart{'s' * (outcome.attempts > 2)}" if outcome.attempts > 1 else ""
    if outcome.exit_code == 0:
        console.print(
            f"[green]finished[/]{restarted}. What happened: [bold]rankscope analyze {run.path}[/]", highlight=False
        )
    else:
        console.print(f"[red]{outcome.reason}[/]{restarted}: {outcome.message}", highlight=False, soft_wrap=True)
        console.print(
            f"why: [bold]rankscope analyze {run.path}[/]   logs: {run.path / 'logs'}", highlight=False, soft_wrap=True
        )
    return outcome.exit_code
