"""`rankscope train --resume RUN`: resume a run whose processes have ended, in the same folder, as its next attempt.

    resumed = prepare(Path("runs/latest"), ["train.steps=400"], force=False)
    resumed.config, resumed.run

The run's configuration is used, with changes by `--set`. Changes of the model or of the numbering of batches are
refused, but another mesh is allowed, because checkpoints can be loaded in any layout.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.guard.ledger import LEDGER_NAME, Ledger
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from trainer.checkpoint.attempt_fence import claims
from trainer.checkpoint.disk_tier.listing import checkpoint_steps
from trainer.config.config import Config
from trainer.config.launch_folder import enter_launch_folder
from trainer.config.load import changed_config
from trainer.guard.ledger_file import save_ledger
from watch.processes import is_alive

__all__ = [
    "FinishedError", "ResumeError", "Resumed", "check_finished", "live_processes", "next_attempt", "prepare",
    "reset_guard",
]  # fmt: skip

UNCHANGEABLE = {
    "model": "would change the model",
    "data": "would change the content of the batches",
    "run": "belongs to the existing run",
    "train.global_batch_size": "would change the numbering of the batches",
    "optim.name": "cannot continue from the state of another optimizer",
}
CHANGEABLE = {"data.num_workers", "data.prefetch", "data.pin_memory", "data.cache_dir", "model.dropout"}


class ResumeError(ValueError):
    """The run cannot be resumed. The message is one line with the reason and what to do."""


class FinishedError(ResumeError):
    """The run has finished, and no option asks for more steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run that can be resumed. `world_size`: number of ranks of the last launch."""

    run: RunDir
    config: Config
    world_size: int


def prepare(path: Path, overrides: list[str], *, force: bool) -> Resumed:
    """Check that the run can be resumed. Raises ResumeError, ConfigError or RunError, one line each.

    `force`: take the run over from live processes (which are fenced, and killed by watch), and retry a run that the
    guard stopped; call `reset_guard` before the launch. Nothing is changed here. Raises FinishedError for a finished
    run if no setting extends it.
    """
    run = RunDir.open(path)
    manifest, before = run.private_manifest(), _recorded(run, path)
    if (alive := list(live_processes(run))) and not force:
        raise ResumeError(
            f"{path} is still alive: {', '.join(alive[:4])}{' ...' * (len(alive) > 4)}. "
            "Wait for its end, or take it over with --force."
        )
    config = _changed(before, overrides)
    _check_unchanged(before, config)
    _check_guard(run, path, force=force)
    if not force:
        _check_finished(run, path, before, config)
    enter_launch_folder(config, manifest)
    world_size = manifest.get("world_size")
    return Resumed(run=run, config=config, world_size=world_size if isinstance(world_size, int) else 0)


def reset_guard(run: RunDir) -> None:
    """Clear the guard's stop, and give the guard a new budget."""
    ledger, _ = Ledger.load(run.checkpoints / LEDGER_NAME)
    if ledger.stopped:
        ledger.stopped, ledger.failures, ledger.rollbacks = "", 0, 0
        save_ledger(ledger)


def next_attempt(run: RunDir) -> int:
    """Number of the next attempt, unless another launch claims one first."""
    return max([*claims(run), *(attempt for attempt, _, _ in run.rank_dirs())], default=-1) + 1


def live_processes(run: RunDir) -> Iterator[str]:
    """Descriptions of the run's live processes on this machine. Processes on other machines cannot be seen, but the
    fence prevents them from writing.
    """
    hostname = socket.gethostname()
    for attempt, process in claims(run).items():
        if process.get("host") == hostname and is_alive(_number(process, "pid"), _number(process, "start_ticks")):
            yield f"its launcher (pid {process['pid']}, attempt {attempt})"
    for attempt, rank, folder in run.rank_dirs():
        events, _, _ = read_events(folder / "events.jsonl", limit_bytes=1 << 20)
        process = next((event for event in events if event["kind"] == event_kinds.RANK), {})
        if process.get("host") == hostname and is_alive(_number(process, "pid"), _number(process, "start_ticks")):
            yield f"rank {rank} (pid {process['pid']}, attempt {attempt})"


def check_finished(path: Path, overrides: list[str]) -> None:
    """Raise FinishedError like `prepare`. This is for nodes that get their configuration from node 0. If the run has
    finished, node 0 exits immediately, and these nodes would wait for it. Without access to the folder nothing is
    raised.
    """
    if not path.exists():
        return
    run = RunDir.open(path)
    before = _recorded(run, path)
    _check_finished(run, path, before, _changed(before, overrides))


def _recorded(run: RunDir, path: Path) -> dict[str, Any]:
    manifest = run.private_manifest()
    before = manifest.get("config")
    if manifest.get("attached"):
        command = " ".join(str(word) for word in manifest.get("command") or ["its script"])
        raise ResumeError(
            f"{path} cannot be resumed here: it was not recorded by `rankscope train`. "
            f"Start {command} again with its own way to resume."
        )
    if not isinstance(before, dict):
        raise ResumeError(f"{path} cannot be resumed: its run.json has no configuration.")
    return before


def _changed(before: dict[str, Any], overrides: list[str]) -> Config:
    # Only `--set checkpoint.resume=false` of this launch starts over. A run.json of an older version may contain that
    # setting from an earlier launch.
    return changed_config(before | {"checkpoint": {**before.get("checkpoint", {}), "resume": True}}, overrides)


def _check_finished(run: RunDir, path: Path, before: dict[str, Any], config: Config) -> None:
    is_same = config.model_dump(mode="json")["train"] == before.get("train") and config.checkpoint.resume
    if is_same and _has_finished(run, config.train.steps):
        raise FinishedError(f"{path} has finished; nothing was started. To continue: --set train.steps=MORE.")


def _has_finished(run: RunDir, steps: int) -> bool:
    """Return True if the newest launch recorded that the run finished, with the state of the last step on disk. Node 0
    takes part in every launch and writes in order, whatever its clock does. The launch that asked for more steps may
    have failed before it recorded its start.
    """
    has_finished = False
    for event in read_events(run.node_dir(0) / "events.jsonl")[0]:
        if event["kind"] == event_kinds.RUN_STARTED:
            has_finished = False
        elif event["kind"] == event_kinds.RUN_ENDED:
            has_finished |= event.get("reason") == "finished"
    return has_finished and max(checkpoint_steps(run.checkpoints), default=steps) >= steps


def _number(process: dict[str, Any], key: str) -> int:
    value = process.get(key)
    return value if isinstance(value, int) else 0


def _check_unchanged(before: dict[str, Any], config: Config) -> None:
    after = config.model_dump(mode="json")
    for section, values in after.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            former = before.get(section, {}).get(name, value)
            reason = UNCHANGEABLE.get(key) or UNCHANGEABLE.get(section)
            if key == "optim.name" and not config.checkpoint.resume:
                continue  # the run starts over
            if value != former and reason and key not in CHANGEABLE:
                raise ResumeError(f"{key} = {value!r} (was {former!r}): {reason}. Start a new run for that.")


def _check_guard(run: RunDir, path: Path, *, force: bool) -> None:
    ledger, _ = Ledger.load(run.checkpoints / LEDGER_NAME)
    if ledger.stopped and not force:
        raise ResumeError(f"{path} was stopped by the guard: {ledger.stopped}. To try again, use --force.")
