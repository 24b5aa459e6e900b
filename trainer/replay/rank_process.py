"""One rank of a replay that needs as many ranks as the run had: `python -m trainer.replay.rank_process FOLDER RANK`.

FOLDER is the scratch folder that `trainer.replay.session` made: it holds the request, ranks find each other through a
file there, and each leaves what it found in `rank-<r>.json`, or why it could not in `rank-<r>.error`, one line.
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
from trainer.layout.plan import resolve
from trainer.replay.session import REQUEST_NAME
from trainer.replay.step_replay import replay_target
from trainer.replay.target import Target
from trainer.torch_compat import FileStore
from trainer.training.build import pick_backend, pick_device

__all__ = ["main"]

RENDEZVOUS_S = 300.0


def main(folder: Path, rank: int) -> int:
    """The exit code: 0, or 2 with a line in `rank-<r>.error`."""
    request = json.loads((folder / REQUEST_NAME).read_text())
    try:
        config = Config.model_validate(request["config"])
        plan = resolve(config, request["world_size"])
        device = pick_device(config, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
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
    dist.barrier()  # no rank closes its connections while others still use them
    return 0


def _reporter(folder: Path, rank: int) -> Callable[[str], None]:
    """Progress of rank 0, passed on to the terminal through a file."""

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
