"""Trains where the checkpoint folder is a disk of its own, in a namespace that nobody else sees.

    python -m tests.trainer.hostile_disk full /tmp/run         # the disk is full until step 10
    python -m tests.trainer.hostile_disk read-only /tmp/run    # read-only until step 10

The kernel refuses, as on a real disk: no function is replaced. What happened is in the run's events.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.checkpoint.state import Position
from trainer.config.config import Config
from trainer.rank.loop import Session

DISK_BYTES = 16 << 20
BALLAST = "ballast"
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000


def config() -> Config:
    return with_steps(small(checkpoint={"interval": 4, "asynchronous": False}), 20)


def main(kind: str, folder: Path) -> None:
    torch.set_num_threads(1)
    _own_mounts()
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", checkpoints)
    ballast = checkpoints / BALLAST
    if kind == "full":
        ballast.write_bytes(bytes(DISK_BYTES - (256 << 10)))  # room for a part of a shard
    else:
        _mount("-o", "remount,ro", checkpoints)

    def relieve() -> None:
        if kind == "full":
            ballast.unlink()
        else:
            _mount("-o", "remount,rw", checkpoints)

    def relieved_after_step_10(session: Session) -> None:
        taken = session.recovery.taken

        def taking(position: Position, batch_index: int) -> Position:
            if position.step == 10:
                relieve()
            return taken(position, batch_index)

        session.recovery.taken = taking  # type: ignore[method-assign]

    result = run_loop(config(), folder, rank=0, world_size=1, change=relieved_after_step_10)
    assert result.outcome == "finished"
    again = run_loop(
        config().model_copy(update={"train": config().train.model_copy(update={"steps": 22})}),
        folder,
        rank=0,
        world_size=1,
        attempt=1,
    )
    print(min(again.losses), sorted(path.name for path in checkpoints.iterdir()))


def _own_mounts() -> None:
    """As `unshare -rm` does it: a user who is root in a namespace where mounting is seen by this process alone."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_USER | _NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    _mount("--make-rprivate", "/")


def _mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
