"""Real ranks for tests: processes in one gloo group, with a deadline.

    results = run_ranks(worker, world_size=4, args=(...,))    # [worker's value on rank 0, on rank 1, ...]

`worker(rank, world_size, *args)` must be importable by name, and its value picklable. Each rank is a fork of a process
that has imported torch and the trainer (`tests.forked`): it starts in milliseconds and leaves nothing to the next one.
A rank that fails, dies or misses the deadline fails the test with its traceback; its peers are killed by their pids.
`worker` may replace the group: it calls `end_group()` first, and a group must exist when it returns.

    process = start_function(worker, folder, 3)       # one process without a group
"""

from __future__ import annotations

import base64
import os
import pickle
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.forked import ForkedPython

_FUNCTION = """
import base64, pickle, sys
function, arguments = pickle.loads(base64.b64decode(sys.argv[1]))
function(*arguments)
"""
_RANK = "import sys; from tests.processes import _rank_main; _rank_main(*sys.argv[1:])"


def run_ranks(
    worker: Callable[..., Any], *, world_size: int, args: tuple[Any, ...] = (), deadline_s: float = 100.0
) -> list[Any]:
    """Run `worker` on every rank and return its values by rank; AssertionError if any rank fails."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "call.pkl").write_bytes(pickle.dumps((worker, world_size, deadline_s, args)))
        ranks = [ForkedPython(["-c", _RANK, name, str(rank)]) for rank in range(world_size)]
        try:
            _wait_for_all(ranks, deadline_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        failures = [
            f"rank {number} (exit code {rank.returncode})\n{_read(folder / f'rank-{number}.txt')}"
            for number, rank in enumerate(ranks)
            if rank.returncode != 0
        ]
        assert not failures, "\n".join(failures)
        # Written by our own children a moment ago.
        return [pickle.loads((folder / f"rank-{number}.pkl").read_bytes()) for number in range(world_size)]  # noqa: S301


def start_function(function: Callable[..., object], *arguments: Any) -> ForkedPython:
    """Start a process that calls `function`, which must be importable by name; an exception is its exit code 1."""
    call = pickle.dumps((function, arguments))
    return ForkedPython(["-c", _FUNCTION, base64.b64encode(call).decode()])


def end_group() -> None:
    """Destroy the default group once every rank has reached this call.

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


def _wait_for_all(ranks: list[ForkedPython], deadline_s: float) -> None:
    """Return once all have ended, one has failed (its peers would wait in a collective), or the time is up."""
    end = time.monotonic() + deadline_s
    while waiting := [rank for rank in ranks if rank.poll() is None]:
        if time.monotonic() > end:
            return
        if any(rank.returncode for rank in ranks):
            end = min(end, time.monotonic() + 1.0)  # the others usually fail a moment later, and their tracebacks help
        select.select(waiting, [], [], max(0.0, end - time.monotonic()))


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "killed at the deadline, or died without a Python exception"


def _rank_main(name: str, number: str) -> None:
    import torch
    import torch.distributed as dist

    folder, rank = Path(name), int(number)
    worker, world_size, deadline_s, args = pickle.loads((folder / "call.pkl").read_bytes())  # noqa: S301  (the test's)
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
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        (folder / f"rank-{rank}.txt").write_text(traceback.format_exc())
        # Leave at once: the destructors of a broken group may wait for ranks that will never come.
        os._exit(1)
