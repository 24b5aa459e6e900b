"""Read NCCL's RAS report in JSON (`ncclras -f json`, NCCL 2.28 and later): states of all communicators, as log events.

    log = read_ras(Path("ras.json"))
    log.events[0].kind, log.events[0].fields      # "ras_state", {"ranks": "3", "launched": 6, "most_launched": 7}

The events are the same as for RAS's text output. RAS numbers ranks per communicator. The numbers in the largest
communicator are used as the job's ranks, and ranks of the other communicators are matched to them by host, process and
device. If no rank is behind, missing or failed, `unjudged` says that a single report cannot show whether the calls will
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from store.readers.dumps.recorded_call import MAX_RANKS, short_text, whole_number
from store.readers.logs.log_file import LogEvent, ReadLog
from store.readers.logs.prefix import Prefix
from store.readers.untrusted.external_files import SourceError, unpacked
from store.readers.untrusted.json_stream import members

__all__ = ["is_ras", "read_ras"]

MAX_COMMUNICATORS = 20_000
MAX_LISTED = 512
_FUNCTIONS = 64
_ERRORS = {1: "unhandled CUDA error", 2: "system error", 3: "internal error", 4: "invalid argument", 5: "invalid usage"}
"""Names of ncclResult_t, except ncclRemoteError (6, caused by another rank) and ncclInProgress (7)."""


def is_ras(first: bytes) -> bool:
    """Return True if a file starts like a RAS report in JSON."""
    return b'"nccl_version"' in first and b'"communicators"' in first and b'"cuda_driver_version"' in first


def read_ras(path: Path) -> ReadLog:
    """Read one RAS report. `problem` says what is wrong with the file."""
    log = ReadLog(path=path, rank=None)
    communicators: list[Mapping[str, Any]] = []
    try:
        for key, value, is_item in members(unpacked(path), {"communicators"}):
            if key == "communicators" and is_item and isinstance(value, dict):
                communicators.append(value)
                if len(communicators) > MAX_COMMUNICATORS:
                    raise SourceError(f"holds more than {MAX_COMMUNICATORS:,} communicators: the rest was not read")
    except SourceError as error:
        log.problem = str(error)
    ranks_of = _ranks_by_process(communicators)
    for number, comm in enumerate(communicators, 1):
        log.events += _events(comm, number, ranks_of)
    if not log.events:
        log.unjudged, log.is_compared = _undecided(communicators)
    return log


def _undecided(communicators: list[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return what a report without a failure leaves undecided, and True if its ranks have equal call counts."""
    several = [ranks for comm in communicators if len(ranks := list(_listed(comm))) > 1]
    counted = [sum(1 for rank in ranks if isinstance(rank.get("collective_counts"), dict)) for ranks in several]
    if not several:
        return "the report lists no communicator of two or more ranks", False
    counts = [
        counts for ranks in several for rank in ranks if isinstance(counts := rank.get("collective_counts"), dict)
    ]
    if counts and not any(whole_number(count) for one in counts for count in one.values()):
        return "the ranks have launched no call yet", False
    if max(counted) < 2:
        return "the report does not state how many calls the ranks have launched", False
    least = "all ranks" if counted == [len(ranks) for ranks in several] else "the ranks with call counts"
    return (
        f"{least} answered and have launched equally many calls, and one report does not show whether the last call "
        "ends. Query RAS again after some seconds"
    ), True


def _ranks_by_process(communicators: list[Mapping[str, Any]]) -> dict[tuple[str, int, int], int]:
    largest: Mapping[str, Any] = max(communicators, key=lambda comm: whole_number(comm.get("size")) or 0, default={})
    numbered = ((_process(rank), whole_number(rank.get("rank"))) for rank in _listed(largest))
    return {process: number for process, number in numbered if number is not None}


def _process(rank: Mapping[str, Any]) -> tuple[str, int, int]:
    pid, device = whole_number(rank.get("pid"), default=0), whole_number(rank.get("cuda_dev"), default=0)
    return short_text(rank.get("host"), 200), pid or 0, device or 0


def _listed(
    comm: Mapping[str, Any], names: tuple[str, ...] = ("ranks", "missing_ranks")
) -> Iterator[Mapping[str, Any]]:
    for name in names:
        found = comm.get(name)
        yield from (rank for rank in (found if isinstance(found, list) else [])[:MAX_RANKS] if isinstance(rank, dict))


def _events(comm: Mapping[str, Any], line: int, ranks_of: Mapping[tuple[str, int, int], int]) -> Iterator[LogEvent]:
    size = whole_number(comm.get("size"))
    name = f"communicator {short_text(comm.get('hash'), 40)} of {size} ranks"
    launched: dict[int, int] = {}
    failed: dict[int, str] = {}
    missing: list[int] = []
    silent = {ranks_of.get(_process(rank)) for rank in _listed(comm, ("missing_ranks",)) if _is_silent(rank)}
    for rank in _listed(comm):
        number = ranks_of.get(_process(rank))
        if number is None:
            continue
        status = rank.get("status")
        counts = rank.get("collective_counts")
        if number in silent:
            missing.append(number)
            continue
        if not isinstance(counts, dict):
            continue  # the rank answered, but did not state its numbers of calls
        launched[number] = sum(whole_number(count) or 0 for count in list(counts.values())[:_FUNCTIONS])
        error = whole_number(status.get("async_error")) if isinstance(status, dict) else None
        if error in _ERRORS:
            failed[number] = _ERRORS[error]
    least, most = min(launched.values(), default=0), max(launched.values(), default=0)
    common: dict[str, Any] = {"world_size": size} if size == len(ranks_of) else {}
    common["members"] = size
    if missing:
        yield _event(line, f"{name}: ranks that did not answer", missing, common)
    if least < most:
        behind = [rank for rank, count in sorted(launched.items()) if count == least]
        text = f"{name}: collective operation counts differ, {least} to {most}"
        yield _event(line, text, behind, {**common, "launched": least, "most_launched": most})
    if failed:
        text = f"{name}: " + ", ".join(f"rank {rank}: {error}" for rank, error in sorted(failed.items())[:8])
        yield _event(line, text, [], {**common, "failed": ", ".join(map(str, sorted(failed)[:MAX_LISTED]))})


def _is_silent(rank: Mapping[str, Any]) -> bool:
    """Return True for a missing rank, unless its process answered and only omitted this communicator."""
    status = rank.get("status")
    states = [status.get(name) for name in ("unresponsive", "considered_dead")] if isinstance(status, dict) else []
    return any(states) or not any(one is not None for one in states)


def _event(line: int, message: str, ranks: list[int], fields: dict[str, Any]) -> LogEvent:
    listed = ", ".join(map(str, sorted(ranks)[:MAX_LISTED]))
    return LogEvent(
        kind="ras_state", role="hang", cause="", line=line, prefix=Prefix(), message=message,
        fields={"ranks": listed, **fields} if listed else fields,
    )  # fmt: skip
