"""All ranks of a launch find the same run folder and attempt independently, without messages or waiting.

    run, attempt, is_first = join_run(identity, runs_dir=Path("runs"), name="train", manifest={...})

The first rank chooses the name and publishes it as the link `runs/.launches/<job>`, which can be created only once; the
others follow it. So ranks may arrive in any order, or not at all. The attempt is claimed in the same way
(`probes.tape.attempts`).
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from ...tape.attempts import claim, is_closed, rank_is_gone
from ...tape.rundir import RunDir
from .identity import Identity

__all__ = ["join_run"]


def join_run(
    identity: Identity, *, runs_dir: Path, name: str, manifest: dict[str, Any], run_dir: Path | None = None
) -> tuple[RunDir, int, bool]:
    """Return (run, attempt, True if this process created the run). `run_dir`: the run's folder, new or existing.

    Raises OSError if nothing can be written, and RunError for a folder with other content.
    """
    job = re.sub(r"[^A-Za-z0-9._-]+", "_", identity.job())
    if run_dir is None:
        run, is_first = RunDir.join(runs_dir, job, f"{name}-{_when(identity, job)}")
    else:
        run, is_first = RunDir.adopt(run_dir)
    if is_first:
        run.begin_manifest(manifest)
    if identity.attempt >= 0:
        return run, identity.attempt, is_first
    launch = f"{job}-{identity.round or identity.restarts}"
    attempt = claim(run, launch=launch, world_size=identity.world_size)
    num_ended = 0
    while _is_over(run.rank_dir(attempt, identity.rank) / "events.jsonl"):
        # Attached again after `detach`, or started again under the same job name: all ranks count the same attempts.
        num_ended += 1
        attempt = claim(run, launch=f"{launch}-{num_ended}", world_size=identity.world_size)
    return run, attempt, is_first


def _when(identity: Identity, job: str) -> str:
    """Return the end of the run's name. It is the time; with several nodes it is the job, because nodes without a
    shared folder must choose the same name."""
    if identity.launch or not identity.is_one_node():
        return os.environ.get("SLURM_JOB_ID") or job
    return time.strftime("%Y%m%d-%H%M%S")


def _is_over(events: Path) -> bool:
    """Return True if the rank that wrote this file has closed it, or has ended on this host."""
    return events.exists() and (is_closed(events) or bool(rank_is_gone(events)))
