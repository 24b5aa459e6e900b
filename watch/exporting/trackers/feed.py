"""Feed a run from its store into an experiment tracker, during the run or afterwards (`rankscope export`).

feed = TrackerFeed(open_tracker("tensorboard", run))
while feed.steps(store): ...            # passes on what is new since the last call
feed.finish(store)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analyzers.account.goodput import measure
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.tape import event_kinds
from probes.tape.rundir import RunDir
from watch.exporting.trackers.tracked_steps import TrackedSteps
from watch.exporting.trackers.tracker import Tracker

__all__ = ["INSTALL", "NAMES", "TrackerFeed", "open_tracker"]

NAMES = ("tensorboard", "wandb")
INSTALL = "pip install 'rankscope[trackers]'"
_SLACK_NS = 60 * 10**9
"""Maximum delay with which a finding is stored after a newer finding. Such delays occur because each node and thread
writes separately."""


class TrackerFeed:
    """Feeds one tracker from a store. `progress`: the progress of an earlier process of the run, to continue from."""

    def __init__(self, tracker: Tracker, *, ranks: Any = "sampled", progress: Mapping[str, Any] | None = None) -> None:
        progress = progress or {}
        self._tracker = tracker
        done, leads = ({int(attempt): n for attempt, n in progress.get(key, {}).items()} for key in ("done", "leads"))
        self._steps = TrackedSteps(ranks=ranks, done=done, leads=leads)
        self._last_step = int(progress.get("last_step", 0))
        # The tracker has already received all findings up to `told_ns`, and of the later ones those in `told`.
        self._sent_until_ns = int(progress.get("told_ns", 0))
        self._sent = {tuple(key) for key in progress.get("told", ())}
        self._ends: dict[int, float] = {}

    @property
    def progress(self) -> dict[str, Any]:
        """Progress as plain JSON values."""
        progress: dict[str, Any] = {"done": self._steps.done, "leads": self._steps.leads}
        return progress | {"last_step": self._last_step, "told_ns": self._sent_until_ns, "told": sorted(self._sent)}

    def steps(self, source: Source, *, is_over: bool = False) -> int:
        """Pass on new steps and return their number. Call it again until it returns 0. Raises TrackerError."""
        taken = self._steps.take(source, is_over=is_over)
        for step in taken:
            if step.step <= self._last_step:
                self._tracker.rolled_back(step.step, step.wall_s)
            self._last_step = step.step
            self._ends[step.step] = step.wall_s
            self._tracker.step(step)
        return len(taken)

    def ended_s(self, step: int | None) -> float:
        """Return the time at which a step ended (epoch seconds). If `step` is None or did not end, return the end of
        the newest step."""
        return self._ends.get(step or 0) or max(self._ends.values(), default=0.0)

    def findings(self, source: Source) -> int:
        """Pass on new findings of watch and return their number. Raises TrackerError."""
        num_new = 0
        for event in EventLog.load(source, [event_kinds.FINDING]).of(event_kinds.FINDING):
            key = (event.wall_ns, event.attempt, event.text("id"), event.text("status"))
            if event.wall_ns <= self._sent_until_ns or key in self._sent or key[-1] not in ("fired", "suspect", "ok"):
                continue
            self._sent.add(key)
            finding = {**event.detail, "kind": event.detail.get("finding_kind"), "first_step": event.step}
            finding["ranks"] = event.detail.get("finding_ranks")
            self._tracker.finding(finding, event.wall_ns / 1e9)
            num_new += 1
        self._sent_until_ns = max(self._sent_until_ns, max(self._sent, default=(0,))[0] - _SLACK_NS)
        self._sent = {key for key in self._sent if key[0] > self._sent_until_ns}
        return num_new

    def finish(self, source: Source | None, **more: str | float) -> None:
        """Pass on the summary and close. Raises TrackerError."""
        account = measure(source, StallPolicy(), None) if source is not None else None
        summary: dict[str, str | float] = {"last_step": self._last_step}
        if account is not None:
            summary |= {"wall_seconds": account.wall_s, "steps_kept": account.num_kept,
                        "steps_discarded": account.num_discarded}  # fmt: skip
            if account.goodput_ratio is not None:
                summary["goodput_ratio"] = account.goodput_ratio
            summary |= {f"time/{category}_seconds": spent for category, spent in account.known_seconds.items()}
        self._tracker.finish(summary | more)


def open_tracker(name: str, run: RunDir, folder: Path | None = None, *, resumes: bool = False, **wandb: str) -> Tracker:
    """Open the tracker called `name`. `resumes`: keep what an earlier process wrote.

    Raises ImportError without the `trackers` extra, and TrackerError.
    """
    manifest = run.manifest()
    config = manifest.get("config")
    config = config if isinstance(config, dict) else {}
    if name == "tensorboard":
        from watch.exporting.trackers.tensorboard_log import TensorBoardLog, remove_logs

        folder = folder or run.path / "tensorboard"
        if not resumes:
            remove_logs(folder)
        started_s = float(manifest.get("created_wall_ns", 0) or 0) / 1e9
        return TensorBoardLog(folder, run_id=run.run_id, config=config, started_s=started_s)
    from watch.exporting.trackers.wandb_run import WandbRun

    versions = {"rankscope_version": manifest.get("rankscope_version"), "mesh": manifest.get("mesh")}
    given = {key: value for key, value in wandb.items() if value}
    return WandbRun(folder or run.path, run_id=run.run_id, config=config | versions, resumes=resumes, **given)
