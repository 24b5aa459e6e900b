"""Remote checkpoints: the first node's launcher fetches them before the ranks start, and uploads new ones while they
run.

remote = RemoteCheckpoints(run, config.checkpoint, events, is_used=node.rank == 0)
failed = remote.begin(console)      # an outcome if the ranks must not start
not_sent = remote.end()             # one line if the newest checkpoint was not sent

path = fetch_run("s3://bucket/runs/gpt-20261122")   # a run that does not exist on this machine
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from trainer.config.config import CheckpointConfig
from trainer.exit_codes import EXIT_STORAGE
from trainer.launcher.node import Outcome
from trainer.launcher.resume import ResumeError

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.checkpoint.remote.mirror import CheckpointMirror

__all__ = ["RemoteCheckpoints", "fetch_run"]

MAX_RUN_JSON_BYTES = 16 << 20


class RemoteCheckpoints:
    """A run's transfers. Does nothing unless `is_used` is set and the configuration names an address."""

    def __init__(self, run: RunDir, config: CheckpointConfig, events: EventWriter, *, is_used: bool) -> None:
        self._run = run
        self._config = config
        self._events = events
        self._is_used = is_used and bool(config.remote)
        self._mirror: CheckpointMirror | None = None

    def begin(self, console: Console) -> Outcome | None:
        """Fetch missing checkpoints and start sending. Returns an outcome if the launch must not continue."""
        if not self._is_used:
            return None
        from trainer.checkpoint.remote.address import RemoteError  # imports torch: only after the checks
        from trainer.checkpoint.remote.mirror import CheckpointMirror, address_of

        mirror = CheckpointMirror(self._run, self._config, self._events)
        try:
            if self._run.manifest().get("start_over_at") is not None:
                aside = self._move_aside(address_of(self._config, self._run))
                console.print(f"earlier checkpoints are in {aside}", highlight=False, soft_wrap=True)
            step = mirror.restore()
        except RemoteError as error:
            return Outcome(reason="failed", exit_code=EXIT_STORAGE, message=f"{error}.")
        if step is not None:
            console.print(f"checkpoint of step {step} fetched from {mirror.address}", highlight=False, soft_wrap=True)
        mirror.start()
        self._mirror = mirror
        return None

    def _move_aside(self, address: str) -> str:
        """Move the remote checkpoints of a run that is started over, because they would otherwise be fetched as the
        newest. Returns their new address.

        Raises RemoteError. Manifests are moved first, because a checkpoint without its manifest does not count as one.
        """
        from trainer.checkpoint.remote.address import RemoteFolder

        folder, aside = RemoteFolder(address), f"before-{time.strftime('%Y%m%d-%H%M%S')}"
        with folder.limit(self._config.remote_limit_s, "Raise checkpoint.remote_limit_s."):
            for prefix in ("checkpoints", "objects", "condemned"):
                for name in folder.sizes(prefix):
                    folder.move(name, f"{aside}/{name}")
        return f"{folder.address}/{aside}"

    def end(self) -> str:
        """Wait until the newest checkpoint is sent. Returns the problem in one line; empty if there is none."""
        return self._mirror.close() if self._mirror is not None else ""


def fetch_run(address: str) -> Path:
    """Return the local folder (in `run.dir`) of the run at an address, created from its `run.json` if necessary.

    The launch then fetches the checkpoints. Raises ResumeError or RunError, one line.
    """
    from trainer.checkpoint.remote.address import RemoteError, RemoteFolder

    parent, _, name = address.rstrip("/").rpartition("/")
    try:
        raw = RemoteFolder(address).read("run.json", MAX_RUN_JSON_BYTES)
        manifest = json.loads(raw) if raw is not None else {}
        config = manifest.get("config", {})
        path = Path(config["run"]["dir"]) / name
    except RemoteError as error:
        raise ResumeError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ResumeError(f"{address} has no run: there is no run.json with a configuration.") from None
    if not RunDir.is_run(path):
        run, _ = RunDir.adopt(path)
        config = config | {"checkpoint": {**config.get("checkpoint", {}), "remote": parent}}
        manifest.pop("digest", None)
        run.write_manifest(manifest | {"config": config})
    return path
