"""Real ranks for tests: processes in one gloo group, with a deadline.

    results = run_ranks(worker, world_size=4, args=(...,))    # [worker's value on rank 0, on rank 1, ...]

`worker(rank, world_size, *args)` must be importable by name, and its value picklable. Processes come from a fork
server that has already imported torch and the trainer, so four ranks start in a fraction of a second and share its
pages.
A rank that fails, dies or misses the deadline fails the test with its traceback; its peers are killed by their pids.
`worker` may replace the group by one of its own: `end_group()` first, and one must be there when it returns.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_PRELOADED = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "tests.trainer.training_runs",  # and with it the trainer, which most workers import
]  # fmt: skip


def run_ranks(
    worker: Callable[..., Any], *, world_size: int, args: tuple[Any, ...] = (), deadline_s: float = 100.0
) -> list[Any]:
    """Run `worker` on every rank and return its values by rank; AssertionError if any rank doesn't finish well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        ranks = [
            context.Process(target=_rank_main, args=(worker, rank, world_size, folder, deadline_s, args), daemon=True)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            _wait_for_all(ranks, deadline_s)
        finally:
            for rank in ranks:
                if rank.is_alive() and rank.pid is not None:
                    os.kill(rank.pid, signal.SIGKILL)
                rank.join()
        failures = [
            f"rank {number} (exit code {rank.exitcode})\n{_read(folder / f'rank-{number}.txt')}"
            for number, rank in enumerate(ranks)
            if rank.exitcode != 0
        ]
        assert not failures, "\n".join(failures)
        # Written by our own children a moment ago.
        return [pickle.loads((folder / f"rank-{number}.pkl").read_bytes()) for number in range(world_size)]  # noqa: S301


def end_group() -> None:
    """End the default group, once every rank is there to do so.

    gloo returns from making a group as soon as this rank is connected. A rank that closes its connections then, or
    after it made a subgroup, fails peers that still connect ("Connection closed by peer"). The ranks meet in the store:
    a barrier would be one more call on the connections, and a rank that leaves it first closes them, too.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"ends-{dist.get_rank()}", "")
    store.wait([f"ends-{rank}" for rank in range(dist.get_world_size())])
    dist.destroy_process_group()


def _wait_for_all(ranks: list[Any], deadline_s: float) -> None:
    """Until all have ended, one has failed (its peers would wait for it in a collective), or time is up."""
    end = time.monotonic() + deadline_s
    waiting = list(ranks)
    while waiting and time.monotonic() < end and not any(rank.exitcode for rank in ranks):
        wait([rank.sentinel for rank in waiting], timeout=end - time.monotonic())
        waiting = [rank for rank in waiting if rank.exitcode is None]
    if any(rank.exitcode for rank in ranks):
        # The others usually fail a moment later, and their tracebacks help.
        wait([rank.sentinel for rank in waiting], timeout=1.0)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "killed at the deadline, or died without a Python exception"


def _rank_main(
    worker: Callable[..., Any], rank: int, world_size: int, folder: Path, deadline_s: float, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=deadline_s)
        )
        value = worker(rank, world_size, *args)
        (folder / f"rank-{rank}.pkl").write_bytes(pickle.dumps(value))
        end_group()
    except BaseException:
        (folder / f"rank-{rank}.txt").write_text(traceback.format_exc())
        # Leave at once: the destructors of a broken group may wait for ranks that will never come.
        os._exit(1)
