"""Write torch's CUDA memory snapshot to the run's folder after an out-of-memory error, reduced in size.

    recorder.memory = MemorySnapshots(run, recorder, history=20_000)     # begins to record stacks of allocations
    record_exception(recorder, error)      # the `exception` event; for an OutOfMemoryError the snapshot as well

`memory/attempt-0/rank-00003-memory.json.gz` has the keys of `torch.cuda.memory._snapshot`: segments, blocks with their
stacks, and the newest trace entries, up to `MAX_BYTES`. An event `memory_snapshot` has its path and a summary. Without
a history (`profiler.memory_history = 0`) the file has sizes but no stacks.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..fail_open import failing_open
from ..recorder import Recorder
from ..tape import event_kinds
from ..tape.run_facts import exception_fields
from ..tape.rundir import RunDir
from ..torch_compat import memory_snapshot, record_memory_history
from .memory_state import FORMAT, summarise

__all__ = ["MemorySnapshots", "record_exception", "reduced"]

MAX_BYTES = 32 << 20
"""Maximum size of a file before compression; about 5,000 blocks with full stacks take 10 MiB."""
MAX_FRAMES = 24
"""Maximum number of frames kept of each stack, the innermost ones."""
MAX_TRACE = 2000
"""Maximum trace entries kept per device, newest first."""
MAX_LINKS = 8
_FRAME_KEYS = ("filename", "line", "name")
_BLOCK_BYTES = 160
"""Estimated size of a block without its stack."""
_UNUSED = re.compile(r"([\d.]+) (bytes|[KMGT]iB) is reserved by PyTorch but unallocated")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def record_exception(recorder: Recorder, error: BaseException) -> None:
    """Record the exception that ends this rank. After an out-of-memory error, write a memory snapshot as well."""
    recorder.event(event_kinds.EXCEPTION, **exception_fields(error), phase=recorder.phase_of(error))
    memory = getattr(recorder, "memory", None)
    if isinstance(memory, MemorySnapshots):
        memory.write(error)


class MemorySnapshots:
    """Snapshots of one rank. `history`: number of allocator events kept with stacks; 0: none."""

    def __init__(self, run: RunDir, recorder: Recorder, *, history: int) -> None:
        self._run, self._recorder = run, recorder
        self._is_written = False
        if history > 0:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch: no types; recording needs CUDA initialised
            record_memory_history(context="alloc", stacks="python", max_entries=history)

    def write(self, error: BaseException) -> None:
        """Write the snapshot if a CUDA allocation failed, at most once per process."""
        failed = _out_of_memory(error)
        if failed is None or self._is_written:
            return
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch: no types
            return
        self._is_written = True
        with failing_open("profiler.memory"):
            snapshot = memory_snapshot()
            state = summarise(snapshot)
            path = self._path()
            num_bytes = _save(reduced(snapshot), path)
            about = asdict(state)
            # The error message states the allocator's counts at the failure, even if no history was recorded.
            unused = _unused_bytes(str(failed))
            if unused is None and state.is_at_failure:
                unused = max(0, state.reserved_bytes - state.allocated_bytes)
            self._recorder.event(
                event_kinds.MEMORY_SNAPSHOT,
                path=path.relative_to(self._run.path).as_posix(),
                bytes=num_bytes,
                unused_bytes=unused,
                **about,
            )

    def _path(self) -> Path:
        folder = self._run.path / "memory" / f"attempt-{self._recorder.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank-{self._recorder.rank:05d}-memory.json.gz"


def reduced(snapshot: Mapping[str, Any], max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Cut the snapshot to a size. The newest trace entries are kept first, then the largest blocks with their stacks.

    Small blocks lose their stacks first and are then left out; `left_out` counts both.
    """
    left = max_bytes
    left_out = {"trace_entries": 0, "stacks": 0, "blocks": 0}
    traces: list[list[Any]] = []
    for trace in snapshot.get("device_traces") or ():
        entries: list[Any] = []
        for entry in reversed(trace[-MAX_TRACE:]):
            short = _short(entry)
            size = len(json.dumps(short, default=str))
            if left - size < max_bytes // 2:  # the other half of the space is for the blocks
                break
            left -= size
            entries.append(short)
        left_out["trace_entries"] += len(trace) - len(entries)
        traces.append(entries[::-1])
    segments = list(snapshot.get("segments") or ())
    blocks = [(block.get("size", 0), number, place) for number, segment in enumerate(segments)
              for place, block in enumerate(segment.get("blocks") or ())]  # fmt: skip
    kept_blocks: dict[int, dict[int, Any]] = {}
    for _, number, place in sorted(blocks, key=lambda one: (-one[0], one[1], one[2])):
        block = _short(segments[number]["blocks"][place])
        size = len(json.dumps(block, default=str))
        if size > left and block.pop("frames", None):
            left_out["stacks"] += 1
            size = _BLOCK_BYTES
        if size > left:
            left_out["blocks"] += 1
            continue
        left -= size
        kept_blocks.setdefault(number, {})[place] = block
    return {
        "format": FORMAT,
        "left_out": left_out,
        "segments": [
            {**_short(segment), "blocks": [one for _, one in sorted(kept_blocks.get(number, {}).items())]}
            for number, segment in enumerate(segments)
        ],
        "device_traces": traces,
    }


def _short(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a segment, block or trace entry: scalar fields and the innermost frames only."""
    plain: dict[str, Any] = {
        key: value for key, value in entry.items() if isinstance(value, (str, int, float, bool, tuple))
    }
    if frames := entry.get("frames"):
        plain["frames"] = [{key: frame.get(key) for key in _FRAME_KEYS} for frame in frames[:MAX_FRAMES]]
    return plain


def _save(content: Mapping[str, Any], path: Path) -> int:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with gzip.open(fresh, "wt", encoding="utf-8", compresslevel=4) as file:
            json.dump(content, file, default=str)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path.stat().st_size


def _out_of_memory(error: BaseException) -> torch.OutOfMemoryError | None:
    """Return the OutOfMemoryError in a chain of exceptions, if any; torch raises this type only for devices."""
    link: BaseException | None = error
    for _ in range(MAX_LINKS):
        if link is None or isinstance(link, torch.OutOfMemoryError):
            return link
        link = link.__cause__ or link.__context__
    return None


def _unused_bytes(message: str) -> int | None:
    found = _UNUSED.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None
