"""Two real gloo ranks that disagree, and the flight-recorder dumps that torch itself writes of them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

GIVE_UP_S = 3.0
COMMON_CALLS = 5
DEADLINE_S = 60.0


def dump_of_a_hang(rank: int, world_size: int, folder: Path, what: str) -> None:
    """Five common calls, then `what`; the dumps `hung/` are taken inside of it, `failed/` after gloo's timeout."""
    import torch
    import torch.distributed as dist

    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=GIVE_UP_S))
    tensor = torch.ones(8)
    for _ in range(3):
        dist.all_reduce(tensor)
    for _ in range(2):
        dist.all_reduce(tensor, group=group)
    _until(lambda: len(_entries()) == COMMON_CALLS and all(entry["retired"] for entry in _entries()))
    part = _parts(dist, torch, group, tensor)[what][rank]
    failed: list[str] = []
    stuck = threading.Thread(target=_run, args=(part, failed), daemon=True)
    stuck.start()
    if part is not _nothing:
        _until(lambda: len(_entries()) > COMMON_CALLS)
    _write(folder / "hung", rank)
    stuck.join(DEADLINE_S)
    _until(lambda: all(entry["retired"] for entry in _entries()))
    _write(folder / "failed", rank)
    dist.barrier()  # a rank that leaves closes its connections, and the other's call fails at once
    if part is not _nothing:
        assert failed, "the call was expected to fail"


def _nothing() -> None:
    pass


def _parts(dist: Any, torch: Any, group: Any, tensor: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    def reduce() -> None:
        dist.all_reduce(tensor, group=group)

    def broadcast() -> None:
        dist.broadcast(tensor, src=0, group=group)

    return {"skipped": (reduce, _nothing), "operation": (reduce, broadcast)}


def _run(part: Callable[[], Any], failed: list[str]) -> None:
    try:
        part()
    except RuntimeError as error:
        failed.append(str(error))


def _entries() -> list[dict[str, Any]]:
    from torch._C import _distributed_c10d as c10d

    entries: list[dict[str, Any]] = json.loads(c10d._dump_fr_trace_json())["entries"]
    return entries


def _until(condition: Callable[[], bool]) -> None:
    wait_for(condition, "the state that the test waits for", deadline_s=DEADLINE_S)


def _write(folder: Path, rank: int) -> None:
    from torch._C import _distributed_c10d as c10d

    for kind in ("pickle", "json"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    text = c10d._dump_fr_trace_json()
    (folder / "json" / f"rank_{rank}.json").write_text(text if isinstance(text, str) else text.decode())
    blob = c10d._dump_fr_trace(includeStackTraces=rank == 0)
    (folder / "pickle" / f"nccl_trace_rank_{rank}").write_bytes(blob)
    now_ns = time.time_ns() + 20 * 10**9  # as if the ranks had hung for so long when they were dumped
    for path in (folder / "json" / f"rank_{rank}.json", folder / "pickle" / f"nccl_trace_rank_{rank}"):
        os.utime(path, ns=(now_ns, now_ns))
