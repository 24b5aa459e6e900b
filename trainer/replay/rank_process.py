"""One rank of a replay that needs as many ranks as the run had: `python -m trainer.replay.rank_process FOLDER RANK`.

FOLDER is a scratch folder of `trainer.replay.session`. It holds the request and the file of the rendezvous. Each rank
writes its result to `rank-<r>.json`, or one line with the error to `rank-<r>.error`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpoint.disk_tier.manifest import CheckpointError, StorageError
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.host_threads import set_host_threads
from trainer.layout.resolve import resolve
from trainer.replay.session import REQUEST_NAME
from trainer.replay.step_replay import replay_target
from trainer.replay.target import Target
from trainer.torch_compat import FileStore
from trainer.training.build import pick_backend, pick_device

__all__ = ["main"]

RENDEZVOUS_S = 300.0


def main(folder: Path, rank: int) -> int:
    """Replay as this rank. Returns the exit code: 0, or 2 after an error."""
    request = json.loads((folder / REQUEST_NAME).read_text())
    try:
        config = Config.model_validate(request["config"])
        plan = resolve(config, request["world_size"])
        device = pick_device(config, rank)
        set_host_threads(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store = FileStore(str(folder / "rendezvous"), plan.world_size)
        dist.init_process_group(
            pick_backend(config, device), store=store, rank=rank, world_size=plan.world_size,
            timeout=timedelta(seconds=RENDEZVOUS_S),
        )  # fmt: skip
        losses = {int(step): loss for step, loss in request["losses"].items()}
        result = replay_target(
            config, plan, Target.from_json(request["target"]), device, losses=losses, report=_reporter(folder, rank)
        )
    except (ConfigError, CheckpointError, StorageError) as error:
        (folder / f"rank-{rank}.error").write_text(" ".join(str(error).split()) + "\n")
        return 2
    (folder / f"rank-{rank}.json").write_text(json.dumps(asdict(result)))
    dist.barrier()  # wait for all ranks, so that no rank closes connections that others still use
    return 0


def _reporter(folder: Path, rank: int) -> Callable[[str], None]:
    """Write the progress of rank 0 to a file, from which the command prints it."""

    def report(line: str) -> None:
        if rank == 0:
            with (folder / "progress.txt").open("a") as progress:
                progress.write(line + "\n")

    return report


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the group is not destroyed: see `trainer.rank.worker`
