"""Join the run and open the tapes of this rank, for an attached loop.

opened = open_recorder(Identity.from_environment(), models, name="", run_dir=None, config={})
if opened is not None:
    recorder, run = opened
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..fail_open import failing_open
from ..profiling.attach import profile_steps
from ..tape import event_kinds
from ..tape.attempts import pids_of_rank
from ..tape.run_facts import device_name, settings, versions
from ..tape.rundir import RunDir, RunError
from ..tape_recorder import TapeRecorder
from .attached_config import attached_config
from .launch.announcement import announce
from .launch.identity import Identity, launcher_pid
from .launch.joining import join_run

__all__ = ["open_recorder", "warn_if_untried"]

logger = logging.getLogger("rankscope.probes")

TRIED = ((2, 6), (2, 15))
"""Oldest and newest tested torch version; docs/compatibility.md lists the trials of each version."""


def open_recorder(
    identity: Identity,
    models: list[nn.Module],
    *,
    name: str,
    run_dir: str | os.PathLike[str] | None,
    config: dict[str, Any],
) -> tuple[TapeRecorder, RunDir] | None:
    """Open this rank's recorder in the run.

    Returns None, with a warning, if the folder is unusable or another process records as this rank."""
    config = attached_config(config, warn=identity.rank == 0)
    manifest = {
        "config": config,
        "attached": True,
        "world_size": identity.world_size,
        "versions": versions(),
        "environment": settings(),
        "launcher_pid": launcher_pid() if "TORCHELASTIC_RUN_ID" in os.environ else 0,
        "command": sys.argv,
        "cwd": _working_folder(),
    } | (device_name() if torch.cuda.is_initialized() else {})  # type: ignore[no-untyped-call]  # torch: no types
    if models:  # if no model is known, the number of parameters is unknown and not zero
        manifest["num_parameters"] = sum(parameter.numel() for model in models for parameter in model.parameters())
    try:
        run, attempt, is_first = join_run(
            identity,
            runs_dir=Path("runs"),
            name=name or _script_name(),
            manifest=manifest,
            run_dir=Path(run_dir) if run_dir is not None else None,
        )
    except (OSError, RunError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            why = f"{error.filename}: {error.strerror}; choose another run_dir"
        logger.warning("rankscope does not record: %s", why)
        return None
    directory = run.rank_dir(attempt, identity.rank)
    pids = pids_of_rank(directory / "events.jsonl")
    if pids and not (identity.is_started_by_script and pids[-1] == _starter()):
        logger.warning(
            "rankscope does not record: another process is rank %d of %s; if you start processes, attach after "
            "init_process_group or set RANK and WORLD_SIZE",
            identity.rank,
            run.path,
        )
        return None
    recorder = TapeRecorder(
        directory,
        rank=identity.rank,
        attempt=attempt,
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        node_rank=identity.node_rank,
        device=_device_of(models, identity.local_rank),
    )
    profile_steps(run, recorder, config, node_rank=identity.node_rank)
    if identity.rank == 0:
        recorder.at_device.append(partial(_add_device_name, run))
        warn_if_untried(torch.__version__)
        recorder.event(event_kinds.ATTEMPT_STARTED, world_size=identity.world_size)
        if not is_first:
            with failing_open("attach.manifest"):
                known = run.manifest()
                fresh = {name: value for name, value in manifest.items() if name not in known}
                if identity.is_started_by_script:  # the parent of the ranks has begun the run as one of a single rank
                    fresh["world_size"] = identity.world_size
                if known or attempt:
                    run.add_to_manifest(fresh)
                else:  # another rank created the run and has not yet written the manifest: whoever writes last wins
                    run.begin_manifest(manifest)
    if identity.local_rank == 0:
        with failing_open("attach.announce"):
            announce(run, attempt)
    return recorder, run


def _starter() -> int:
    """Pid of the process that started this one through `multiprocessing`; 0 if none did."""
    parent = multiprocessing.parent_process()
    return parent.pid or 0 if parent is not None else 0


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return os.environ.get("PWD", "")


def _script_name() -> str:
    path = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("python")
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return re.sub(r"^-.*", "python", stem) or "python"


def _device_of(models: list[nn.Module], local_rank: int) -> str:
    parameter = next((parameter for model in models for parameter in model.parameters()), None)
    if parameter is not None:
        return str(parameter.device)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch: no types
        return f"cuda:{torch.cuda.current_device()}"
    # torch counts by NVML here. Initialising CUDA would fix the visible devices, and break processes forked later.
    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]  # torch: no types
    count = torch.cuda.device_count() if is_built else 0  # a program may redirect CUDA to the CPU
    return f"cuda:{local_rank % count}" if count else "cpu"


def _add_device_name(run: RunDir) -> None:
    if "device_name" not in run.manifest():
        run.add_to_manifest(device_name())


def warn_if_untried(version: str) -> bool:
    """Log a line and return True for a version outside of the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or TRIED[0] <= (int(found[1]), int(found[2])) <= TRIED[1]:
        return False
    oldest, newest = (".".join(map(str, tried)) for tried in TRIED)
    logger.warning(
        "rankscope is not tested with torch %s (tested: %s to %s); what it cannot hook is not recorded",
        version, oldest, newest,
    )  # fmt: skip
    return True
