"""Write a run to Weights & Biases through its library, online or to files that `wandb sync` uploads later.

    run = WandbRun(Path("runs/demo/wandb"), run_id="demo", config=manifest["config"], project="llm")
    run.step(step); run.finish({"goodput_ratio": 0.9})

The step is logged as a value (`step`) and used as the axis of all charts, because W&B's step counter cannot decrease,
which a rollback requires. W&B's variables (WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL, WANDB_MODE ...) apply. Without
a key and a mode the run is written offline. System statistics are off, since this is not the training process.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from watch.exporting.trackers.tracker import TrackedStep, TrackerError

__all__ = ["WandbRun"]

_COLUMNS = ("kind", "severity", "status", "ranks", "first_step", "last_step", "cause", "summary", "advice")
_MAX_ID = 64
MAX_FINDINGS = 1000


class WandbRun:
    """One W&B run. Raises ImportError without the `trackers` extra, and TrackerError if W&B refuses."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        config: Mapping[str, Any],
        project: str = "rankscope",
        entity: str = "",
        mode: str = "",
        resumes: bool = False,
    ) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")  # before wandb is imported
        import wandb

        self._wandb: Any = wandb
        self._findings: dict[object, list[Any]] = {}
        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                dir=folder,
                id=_safe_id(run_id),
                name=run_id,
                project=project,
                entity=entity or None,
                config=dict(config),
                mode=_mode(wandb, mode),
                resume="allow" if resumes else None,
                settings=quiet,
            )
        except OSError as error:
            raise TrackerError(f"{folder} cannot be written: {error.strerror or error}") from error
        except (wandb.Error, ValueError) as error:
            raise TrackerError(f"W&B: {' '.join(str(error).split())[:300]}") from error
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @property
    def place(self) -> str:
        """URL of the run's page at W&B, or the folder of an offline run."""
        return str(Path(self._run.dir).parent) if self._run.offline else str(self._run.url)

    @property
    def next_step(self) -> str:
        """Command that shows the run."""
        return f"wandb sync {shlex.quote(str(self.place))}" if self._run.offline else f"open {self.place}"

    def step(self, step: TrackedStep) -> None:
        """Add one row to W&B's history, with the time of the step."""
        row: dict[str, Any] = {"step": step.step, "attempt": step.attempt, "_timestamp": step.wall_s, **step.values}
        for rank, values in step.ranks.items():
            row |= {f"rank-{rank:05d}/{name.rpartition('/')[2]}": value for name, value in values.items()}
        row |= {f"gradients/norm/{layer}": norm for layer, norm in step.layers.items()}
        norms = [math.log10(norm) for norm in step.layers.values() if 0 < norm < math.inf]
        if len(norms) > 1:
            row["gradients/log10_layer_norm"] = self._wandb.Histogram(norms)
        self._run.log(row)

    def rolled_back(self, step: int, wall_s: float) -> None:
        """Log the step as `went_back_to`. W&B's history is append-only, so both executions of a step stay; `attempt`
        and `_timestamp` distinguish them.
        """
        self._run.log({"step": step, "went_back_to": step, "_timestamp": wall_s})

    def finding(self, finding: Mapping[str, Any], wall_s: float, *, is_news: bool = True) -> None:
        """Add a row to the table of findings, and send an alert while the run is alive."""
        if len(self._findings) < MAX_FINDINGS or finding.get("id") in self._findings:
            cells = [finding.get(name) for name in _COLUMNS]
            cells[_COLUMNS.index("ranks")] = ", ".join(map(str, finding.get("ranks") or ()))
            self._findings[finding.get("id")] = cells
        if is_news and finding.get("status") == "fired" and finding.get("severity") in ("warning", "critical"):
            level = self._wandb.AlertLevel.ERROR if finding["severity"] == "critical" else self._wandb.AlertLevel.WARN
            self._run.alert(str(finding.get("kind"))[:64], str(finding.get("summary"))[:1000], level)

    def flush(self) -> None:
        """Do nothing: W&B's process writes and uploads."""

    def finish(self, summary: Mapping[str, str | float]) -> None:
        """Add the table of findings and the summary; waits for W&B to write (online: to upload) them."""
        self._run.log({"findings": self._wandb.Table(columns=list(_COLUMNS), data=list(self._findings.values()))})
        self._run.summary.update(dict(summary))
        self._run.finish()


def _mode(wandb: Any, mode: str) -> Any:
    """The given mode. Without one, W&B's setting applies. Without either, online if there is a key and offline
    otherwise."""
    if mode or os.environ.get("WANDB_MODE"):
        return mode or None
    return None if wandb.login(prompt=False) else "offline"


def _safe_id(run_id: str) -> str:
    """Convert the run's id to a valid W&B id. The result is always the same for the same run."""
    if len(run_id) <= _MAX_ID and re.fullmatch(r"[\w.-]+", run_id):
        return run_id
    return hashlib.blake2b(run_id.encode(), digest_size=16).hexdigest()
