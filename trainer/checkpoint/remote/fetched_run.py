"""Fetch a run's checkpoint from an address to a temporary folder, for commands that read one.

with fetched_run("s3://bucket/runs/gpt-20261122", step=None) as folder:
    find_checkpoint(folder, step=None)
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from probes.guard.ledger import LEDGER_NAME, copy_of
from probes.tape.rundir import RunDir
from trainer.checkpoint.disk_tier.manifest import CheckpointError
from trainer.checkpoint.remote.address import RemoteFolder
from trainer.checkpoint.remote.copies import RemoteCopies

__all__ = ["fetched_run"]

MAX_FILE_BYTES = 16 << 20
_NAME = re.compile(r"\w[\w.-]{0,199}")


@contextlib.contextmanager
def fetched_run(path: str, *, step: int | None) -> Iterator[Path]:
    """Yield a run's folder: `path` itself, or if it is an address, a temporary folder with the run's `run.json`, ledger
    and checkpoint of `step` (None: the newest).

    Raises CheckpointError if the checkpoint does not exist or is damaged, and RemoteError.
    """
    if "://" not in path:
        yield Path(path)
        return
    folder = RemoteFolder(path)
    copies = RemoteCopies(folder)
    copies.open()
    if not copies.steps:
        raise CheckpointError(f"{folder.address}: has no finished checkpoint (expected checkpoints/step-*.json)")
    chosen = copies.steps[-1] if step is None else step
    if chosen not in copies.steps:
        available = ", ".join(map(str, copies.steps))
        raise CheckpointError(f"{folder.address}: has no checkpoint of step {chosen}. There are {available}.")
    with tempfile.TemporaryDirectory(prefix="rankscope-") as made:
        run = Path(made, "run")
        checkpoints = run / "checkpoints"
        for name, local in (("run.json", run), (LEDGER_NAME, checkpoints)):
            if (content := folder.read(name, MAX_FILE_BYTES)) is not None:
                local.mkdir(parents=True, exist_ok=True)
                for each in {name, copy_of(Path(name)).name} if name == LEDGER_NAME else {name}:
                    (local / each).write_bytes(content)
        copies.fetch(chosen, checkpoints, condemn=False)
        name = RunDir(run).recorded_id()  # commands name a run after its folder, which is temporary here
        yield run.rename(run.with_name(name)) if _NAME.fullmatch(name) else run
