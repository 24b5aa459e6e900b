"""Write a run as TensorBoard event files: one folder for the run, and a folder in it for each rank.

    log = TensorBoardLog(Path("runs/demo/tensorboard"), run_id="demo", config=manifest["config"])
    log.step(step); log.finding(finding, wall_s); log.finish({"goodput_ratio": 0.9})

    tensorboard --logdir runs/demo/tensorboard

Ranks have separate folders because TensorBoard draws the same scalar of several folders in one chart. Steps that are
repeated after a rollback or restart replace the former ones (by TensorBoard's session-start mark). Records are buffered
and appended at `flush`, so that a thousand ranks need neither threads nor open files.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analyzers.report.runbook_sections import explain_command
from watch.exporting.trackers.tracker import TrackedStep, TrackerError, flat

__all__ = ["SUFFIX", "TensorBoardLog", "remove_logs"]

SUFFIX = ".rankscope"
"""Suffix of Rankscope's event files: an export replaces only files with this suffix."""
HISTOGRAM = "gradients/log10_layer_norm"


class TensorBoardLog:
    """Writes event files. Raises ImportError without the `trackers` extra."""

    def __init__(self, folder: Path, *, run_id: str, config: Mapping[str, Any], started_s: float = 0.0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary, self._records = Event, SessionLog, Summary, RecordWriter
        self._histogram, self._text = histogram_pb, text_pb
        self._folder = folder
        self._name = f"events.out.tfevents.{int(time.time()):010d}.{os.uname().nodename}.{os.getpid()}{SUFFIX}"
        self._waiting: dict[Path, list[bytes]] = {}
        self._begun: set[Path] = set()
        self._last_step = 0
        self._started_s = started_s or time.time()
        shown = {key: _plain(value) for key, value in flat(config)}
        self._add(folder, self._started_s, 0, hparams_pb(shown, trial_id=run_id, start_time_secs=self._started_s))
        table = _table(("setting", "value"), shown)
        self._add(folder, self._started_s, 0, text_pb("run/config", table))

    @property
    def place(self) -> str:
        """Folder of the event files."""
        return str(self._folder)

    @property
    def next_step(self) -> str:
        """Command that shows the run."""
        return f"tensorboard --logdir {shlex.quote(str(self._folder))}"

    def step(self, step: TrackedStep) -> None:
        """Add the scalars of a step, of its ranks and layers."""
        self._last_step = step.step
        layers = {f"gradients/norm/{layer}": norm for layer, norm in step.layers.items()}
        self._scalars(self._folder, step, {**step.values, **layers})
        for rank, values in step.ranks.items():
            self._scalars(self._folder / f"rank-{rank:05d}", step, values)
        norms = [math.log10(norm) for norm in step.layers.values() if 0 < norm < math.inf]
        if len(norms) > 1:
            self._add(self._folder, step.wall_s, step.step, self._histogram(HISTOGRAM, norms))

    def rolled_back(self, step: int, wall_s: float) -> None:
        """Make TensorBoard drop its values of this step and all later ones."""
        for folder in list(self._begun):
            start = self._session(status=self._session.START)
            self._append(folder, self._event(wall_time=wall_s, step=step, session_log=start))

    def finding(self, finding: Mapping[str, Any], wall_s: float, *, is_news: bool = True) -> None:
        """Add the finding as text, under its kind."""
        step = finding.get("first_step")
        self._add(
            self._folder, wall_s, self._last_step if step is None else int(step),
            self._text(f"findings/{finding.get('kind')}", _markdown(finding)),
        )  # fmt: skip

    def flush(self) -> None:
        """Append the buffered records to the files. Raises TrackerError."""
        try:
            for folder, events in self._waiting.items():
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / self._name).open("ab") as file:
                    writer = self._records(file)
                    for event in events:
                        writer.write(event)
        except OSError as error:
            raise TrackerError(f"{self._folder} cannot be written: {error.strerror}") from error
        self._waiting.clear()

    def finish(self, summary: Mapping[str, str | float]) -> None:
        """Add the summary as text, and flush."""
        table = _table(("", ""), summary)
        self._add(self._folder, time.time(), self._last_step, self._text("run/summary", table))
        self.flush()

    def _scalars(self, folder: Path, step: TrackedStep, values: Mapping[str, float]) -> None:
        if values:
            shown = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._add(folder, step.wall_s, step.step, self._summary(value=shown))

    def _add(self, folder: Path, wall_s: float, step: int, summary: Any) -> None:
        self._append(folder, self._event(wall_time=wall_s, step=step, summary=summary))

    def _append(self, folder: Path, event: Any) -> None:
        if folder not in self._begun:
            self._begun.add(folder)
            self._append(folder, self._event(wall_time=self._started_s, file_version="brain.Event:2"))
        self._waiting.setdefault(folder, []).append(event.SerializeToString())


def remove_logs(folder: Path) -> None:
    """Remove earlier event files of Rankscope from the folder. Raises TrackerError."""
    try:
        for path in [*folder.glob(f"events.out.tfevents.*{SUFFIX}"), *folder.glob(f"rank-*/events.*{SUFFIX}")]:
            path.unlink()
    except OSError as error:
        raise TrackerError(f"{error.filename} cannot be replaced: {error.strerror}") from error


def _plain(value: Any) -> bool | int | float | str:
    if isinstance(value, (bool, int, float, str)):
        return value
    return "" if value is None else json.dumps(value, default=str)


def _cell(value: object) -> str:
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    return shown.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")[:500]


def _table(heading: tuple[str, str], rows: Mapping[str, object]) -> str:
    cells = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join([f"| {heading[0]} | {heading[1]} |", "|---|---|", *cells])


def _markdown(finding: Mapping[str, Any]) -> str:
    about = [f"**{_cell(finding.get('severity'))}, {_cell(finding.get('status'))}**: {_cell(finding.get('summary'))}"]
    evidence = finding.get("evidence")
    evidence = evidence if isinstance(evidence, Mapping) else {}
    numbers = {name: value for name, value in evidence.items() if isinstance(value, (str, int, float))}
    if numbers:
        about += ["", _table(("evidence", ""), numbers)]
    if finding.get("advice"):
        about += ["", f"`{explain_command(_cell(finding['advice']))}`"]
    return "\n".join(about)
