"""Writes a run into an experiment tracker, while it lives (a process of `watch`'s) or afterwards (`rankscope export`).

    python -m watch.exporting.trackers.follow RUN --to tensorboard    # until its standard input ends; started by watch

The store is the queue: each look takes what is new since the last, so a tracker that is slow or was away for a while
misses nothing and holds nobody up. How far it got is kept in `RUN/trackers/<name>.json`: whoever goes on does so there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from analyzers.account.goodput import measure
from analyzers.run.event_log import EventLog
from analyzers.run.policy import StallPolicy
from analyzers.source import Source
from probes.tape import event_kinds
from probes.tape.rundir import RunDir, RunError
from store import Store, StoreError
from watch.exporting.trackers.tracked_steps import TrackedSteps
from watch.exporting.trackers.tracker import Tracker, TrackerError

__all__ = ["MISSING", "NAMES", "Tracking", "open_tracker"]

NAMES = ("tensorboard", "wandb")
MISSING = "pip install 'rankscope[trackers]'"


class Tracking:
    """Feeds one tracker from a store. `progress` is where a former process of the run got to."""

    def __init__(self, tracker: Tracker, *, ranks: Any = "sampled", progress: Mapping[str, Any] | None = None) -> None:
        progress = progress or {}
        self._tracker = tracker
        self._steps = TrackedSteps(ranks=ranks, done={int(a): ns for a, ns in progress.get("done", {}).items()})
        self._last_step = int(progress.get("last_step", 0))
        self._told_ns = int(progress.get("told_ns", 0))
        self._ends: dict[int, float] = {}

    @property
    def progress(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"done": self._steps.done, "last_step": self._last_step, "told_ns": self._told_ns}

    def steps(self, source: Source, *, is_over: bool = False) -> int:
        """Hand over steps that are new, how many. Call it again until it is 0. Raises TrackerError."""
        taken = self._steps.take(source, is_over=is_over)
        for step in taken:
            if step.step <= self._last_step:
                self._tracker.went_back(step.step, step.wall_s)
            self._last_step = step.step
            self._ends[step.step] = step.wall_s
            self._tracker.step(step)
        return len(taken)

    def ended_s(self, step: int | None) -> float:
        """When a step ended last (epoch seconds); the newest one if it did not, or is none."""
        return self._ends.get(step or 0) or max(self._ends.values(), default=0.0)

    def findings(self, source: Source) -> int:
        """Hand over what watch has said of late, how many. Raises TrackerError."""
        told = 0
        for event in EventLog.load(source, [event_kinds.FINDING]).of(event_kinds.FINDING):
            if event.wall_ns <= self._told_ns or event.detail.get("status") not in ("fired", "suspect", "ok"):
                continue
            self._told_ns = event.wall_ns
            finding = {**event.detail, "kind": event.detail.get("finding_kind"), "first_step": event.step}
            finding["ranks"] = event.detail.get("finding_ranks")
            self._tracker.finding(finding, event.wall_ns / 1e9)
            told += 1
        return told

    def finish(self, source: Source | None, **more: str | float) -> None:
        """The summary, and the end. Raises TrackerError."""
        account = measure(source, StallPolicy(), None) if source is not None else None
        summary: dict[str, str | float] = {"last_step": self._last_step}
        if account is not None:
            summary |= {"goodput_ratio": account.goodput_ratio, "wall_seconds": account.wall_s,
                        "steps_kept": account.num_kept, "steps_discarded": account.num_discarded}  # fmt: skip
            summary |= {f"time/{category}_seconds": spent for category, spent in account.seconds.items()}
        self._tracker.finish(summary | more)


def open_tracker(name: str, run: RunDir, folder: Path | None = None, *, again: bool = False, **wandb: str) -> Tracker:
    """The tracker called `name`. Raises ImportError without the `trackers` extra, TrackerError."""
    manifest = run.manifest()
    config = manifest.get("config")
    config = config if isinstance(config, dict) else {}
    if name == "tensorboard":
        from watch.exporting.trackers.tensorboard_log import TensorBoardLog, forget

        folder = folder or run.path / "tensorboard"
        if not again:
            forget(folder)
        started_s = float(manifest.get("created_wall_ns", 0) or 0) / 1e9
        return TensorBoardLog(folder, run_id=run.run_id, config=config, started_s=started_s)
    from watch.exporting.trackers.wandb_run import WandbRun

    about = {"rankscope_version": manifest.get("rankscope_version"), "mesh": manifest.get("mesh")}
    given = {key: value for key, value in wandb.items() if value}
    return WandbRun(folder or run.path, run_id=run.run_id, config=config | about, again=again, **given)


def _follow(run: RunDir, name: str, section: Mapping[str, Any], is_closed: Callable[[float], bool]) -> None:
    """Until `is_closed(timeout_s)`. Raises TrackerError, ImportError."""
    path = run.path / "trackers" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    alone = path.with_suffix(".lock").open("w")
    while not _locked(alone):  # one that is still finishing a former launch of the run
        if is_closed(0.2):
            return
    progress: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        progress = json.loads(path.read_text(encoding="utf-8"))
    folder = Path(section["tensorboard_dir"]) / run.run_id if section.get("tensorboard_dir") else None
    wandb = {key.removeprefix("wandb_"): str(value) for key, value in section.items() if key.startswith("wandb_")}
    tracker = open_tracker(name, run, folder if name == "tensorboard" else None, again=bool(progress), **wandb)
    tracking = Tracking(tracker, ranks=section.get("ranks", "sampled"), progress=progress)
    period_s, is_over = float(section.get("every_s", 5.0)), False
    while True:
        num_new = 1
        while num_new:
            try:  # a short connection for each piece: the writer waits while one is open
                with Store.open(run, catch_up=False) as store:
                    num_new = tracking.steps(store, is_over=is_over)
                    tracking.findings(store)
            except StoreError as error:  # not there yet, or locked for long: the next look sees all of it
                sys.stderr.write(f"{error}\n")
                break
            tracker.flush()
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(tracking.progress), encoding="utf-8")
            fresh.replace(path)
        if is_over:
            break
        is_over = is_closed(period_s)
    try:
        with Store.open(run, catch_up=False) as store:
            tracking.finish(store)
    except StoreError:
        tracking.finish(None)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the process beside watch: 0 after a run that ended, 2 if the tracker cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", choices=NAMES, required=True)
    options = parser.parse_args(arguments)

    def is_closed(timeout_s: float) -> bool:
        ready, _, _ = select.select([0], [], [], timeout_s)
        return bool(ready) and not os.read(0, 1)

    try:
        run = RunDir.open(options.run)
        config = run.manifest().get("config")
        section = config.get("trackers", {}) if isinstance(config, dict) else {}
        _follow(run, options.to, section, is_closed)
    except ImportError as error:
        sys.stderr.write(f"{error}: {MISSING}\n")
        return 2
    except (RunError, TrackerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
