"""Read thousands of dumps in child processes with limits on memory and time.

    for path, dump in read_many([(path, rank), ...]): ...      # a RankDump, or a SourceError with the reason
    dumps = read_dumps(survey(folder))                         # one per rank

`safe_pickle` interprets a pickle in Python: 40 ms for a ring of 2,000 entries, too slow for 4,096 ranks. Python's
unpickler takes 6 ms (2 ms if the newest entries are enough: `newest_entries`). If `find_class` refuses everything, it
executes no code, but a few bytes can make it exhaust memory or never return. So it is only used in a child process with
kernel limits. A dump that fails there is read again by `safe_pickle`, which reports the reason.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import resource
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, cast

from store.readers.dumps.flight_recorder import MAX_PICKLE_BYTES, RankDump, read_dump
from store.readers.dumps.newest_entries import Memo, newest_entries
from store.readers.untrusted.confined import confined
from store.readers.untrusted.external_files import SourceError, Survey, rank_of_name, read_whole

__all__ = ["FEW", "read_dumps", "read_many"]

FEW = 64
"""Up to this many dumps are read one by one, because starting a pool of processes takes longer."""
CHUNK = 16
MEMORY_BYTES = 2 << 30
"""Address space limit of one process. A dump of 2,000 entries takes 20 MB."""
TIME_S = 20
"""Seconds per dump. The default action of SIGALRM kills the process in any state."""

Read = tuple[Path, RankDump | SourceError]


def read_dumps(found: Survey) -> list[RankDump]:
    """Read a job's dumps, the best one of each rank. Unreadable files are added to `found.problems`."""
    by_rank: dict[int, RankDump] = {}
    places: list[tuple[Path, int]] = []
    for path in found.paths:
        rank = rank_of_name(path)
        if rank is None:
            found.add_problem(path, "has no rank in its name: name the dumps by rank (nccl_trace_rank_3)")
        else:
            places.append((path, rank))
    for path, dump in read_many(places):
        if isinstance(dump, SourceError):
            found.add_problem(path, str(dump))
            continue
        rank = dump.rank
        if dump.damaged_entries:
            found.add_problem(path, f"{dump.damaged_entries} damaged entries were left out")
        other = by_rank.get(rank)
        if other is not None:
            better, worse = (dump, other) if _preference(dump) > _preference(other) else (other, dump)
            found.add_problem(worse.path, f"is a second dump of rank {rank}: {better.path.name} was read instead")
            dump = better
        by_rank[rank] = dump
    return [by_rank[rank] for rank in sorted(by_rank)]


def _preference(dump: RankDump) -> tuple[int, bool, int]:
    """Sort key for dumps of one rank: prefer the latest, then one with call stacks."""
    return (dump.last_ns, dump.has_frames, dump.num_entries)


def read_many(
    places: Sequence[tuple[Path, int]], processes: int | None = None, *, time_s: float = TIME_S
) -> Iterator[Read]:
    """Yield the dumps in the order of `places`, each (file, rank)."""
    done = 0
    number = processes or min(8, os.cpu_count() or 1)
    if len(places) > FEW and number > 1:
        chunks = [places[at : at + CHUNK] for at in range(0, len(places), CHUNK)]
        context = multiprocessing.get_context("spawn")  # spawn, because the caller may have threads
        with ProcessPoolExecutor(number, mp_context=context, initializer=_confine) as pool:
            try:
                for chunk, found in zip(chunks, pool.map(partial(_read_chunk, time_s=time_s), chunks), strict=True):
                    for (path, rank), dump in zip(chunk, found, strict=True):
                        yield path, dump if dump is not None else _read(path, rank)
                        done += 1
            except BrokenProcessPool:  # a child hit its limits: read the rest one by one
                pool.shutdown(wait=False, cancel_futures=True)
    for path, rank in places[done:]:
        yield path, _read(path, rank)


def _read(path: Path, rank: int) -> RankDump | SourceError:
    try:
        return confined(read_dump, path, rank)
    except SourceError as error:
        return error


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    gc.disable()  # millions of objects are created, none of them in a cycle
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # left to the caller


def _read_chunk(places: Sequence[tuple[Path, int]], time_s: float) -> list[RankDump | None]:
    return [_read_quickly(path, rank, time_s) for path, rank in places]


def _read_quickly(path: Path, rank: int, time_s: float) -> RankDump | None:
    """Read a dump in the child process; None on any error."""
    signal.setitimer(signal.ITIMER_REAL, time_s)
    try:
        return read_dump(path, rank, unpickle=_loads)
    except Exception:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Plain(pickle.Unpickler):
    """Unpickler for numbers, strings and containers only: any lookup of a class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("asks for a Python object")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("asks for a Python object")


def _loads(path: Path) -> Any:
    blob = read_whole(path, MAX_PICKLE_BYTES)[0]
    shortened = newest_entries(blob, _unpickled)
    return _unpickled(blob, None)[0] if shortened is None else shortened


def _unpickled(blob: bytes, memo: Memo | None) -> tuple[Any, Memo]:
    unpickler = _Plain(io.BytesIO(blob))
    if memo is not None:
        unpickler.memo = cast(Any, memo)
    return unpickler.load(), unpickler.memo
