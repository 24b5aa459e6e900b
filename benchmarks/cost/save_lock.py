"""Time that a training thread loses to the interpreter's lock while another thread writes a shard.

    python -m benchmarks.cost.save_lock

One process, 160 tensors of the demo's sizes, 24 saves of which the first four are not counted. The training thread
multiplies small matrices, each of which lets go of the lock. Blocked is the time of the save in which it was neither on
a core nor ready to run (`/proc/thread-self/schedstat`), so other work on the machine adds little to it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from trainer.checkpoint.disk_tier.checkpoints import SWITCH_INTERVAL_S
from trainer.checkpoint.disk_tier.save_plan import SavePlan

SHAPES = [(96,), (96, 24), (64, 96), (24, 96)] * 40
SAVES, WARM_UP = 24, 4


def blocked_ms() -> float:
    """Clocks of the calling thread, up to an additive constant."""
    waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return (time.monotonic_ns() - time.thread_time_ns() - waited) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tensors = {f"t{number}": torch.randn(shape) for number, shape in enumerate(SHAPES)}
    plan, matrix = SavePlan.make(tensors, rank=0), torch.randn(96, 96)
    lost: list[float] = []
    used: list[float] = []

    def write(folder: Path) -> None:
        start = time.thread_time_ns()
        plan.write_shard(folder, tensors)
        used.append((time.thread_time_ns() - start) / 1e6)

    with tempfile.TemporaryDirectory(prefix="save-lock-") as name, ThreadPoolExecutor(1) as background:
        for number in range(SAVES):
            folder = Path(name, str(number))
            folder.mkdir()
            before = blocked_ms()
            job = background.submit(write, folder)
            while not job.done():
                _ = matrix @ matrix
            job.result()
            lost.append(blocked_ms() - before)
    lost, used = lost[WARM_UP:], used[WARM_UP:]
    sys.stdout.write(
        f"training thread blocked a save: median {np.median(lost):.2f} ms, longest {max(lost):.2f} ms; "
        f"the thread that writes computed {np.median(used):.2f} ms\n"
    )


if __name__ == "__main__":
    main()
