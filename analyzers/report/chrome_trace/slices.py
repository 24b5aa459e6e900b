"""Steps, phases and collectives of a trace, with the memory of each rank and the arrows between its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from analyzers.report.chrome_trace.choice import TraceChoice, row_parts
from analyzers.report.chrome_trace.clock import TraceClock
from analyzers.report.chrome_trace.flows import Call, CallFlows
from analyzers.report.chrome_trace.plain_values import plain, text
from analyzers.report.chrome_trace.tracks import CALLS, PHASES, STAGES, STEPS, Tracks
from analyzers.source import Source

__all__ = ["slices"]

_TABLES = {
    "steps": "SELECT rank, step, 'step ' || step AS name, start_ns AS begin_ns, start_ns + duration_ns AS end_ns, "
    "NULL AS stage, {'loss': loss, 'committed': committed, 'waited_ms': collective_wait_ns / 1e6, "
    "'memory_mib': memory_bytes / 1048576.0} AS args FROM steps",
    "spans": "SELECT rank, step, kind AS name, start_ns AS begin_ns, end_ns, stage, "
    "{'step': step, 'microbatch': microbatch, 'waited_ms': wait_ns / 1e6} AS args FROM spans",
    "collectives": "SELECT rank, step, op AS name, issue_ns AS begin_ns, end_ns, NULL AS stage, {'step': step, "
    "'group': process_group, 'number': seq, 'bytes': bytes, 'dtype': dtype, 'shape': shape, 'peer': peer, "
    "'caller': caller, 'waited_ms': wait_ns / 1e6} AS args FROM collectives",
}


def slices(
    source: Source, choice: TraceChoice, clock: TraceClock, tracks: Tracks, ends_ns: Mapping[int, int]
) -> Iterator[dict[str, Any]]:
    """Events of all records of the ranks. `ends_ns`: {attempt: its last record}.

    A record that never ended is a slice without an end. If another attempt follows in the trace, the slice ends with
    its own attempt. Otherwise it would enclose the whole next attempt.
    """
    for table in _TABLES:
        if source.has(table):
            yield from _table_slices(table, source, choice, clock, tracks, ends_ns)


def _table_slices(
    table: str, source: Source, choice: TraceChoice, clock: TraceClock, tracks: Tracks, ends_ns: Mapping[int, int]
) -> Iterator[dict[str, Any]]:
    lanes: dict[int, list[int]] = {}
    never_ended: list[tuple[int, int, str]] = []
    flows = CallFlows()
    previous: int | None = None
    for attempt, part in row_parts(source, table, choice):
        if previous not in (None, attempt):
            for rank, thread, name in reversed(never_ended):
                yield {"ph": "E", "name": name, "pid": rank, "tid": thread, "ts": clock.us(ends_ns[previous] + 1),
                       "args": {"never_ended": True}}  # fmt: skip
            never_ended, lanes = [], {}
        previous = attempt
        for rank, name, begin_ns, end_ns, stage, args in source.rows(
            f"SELECT rank, name, begin_ns, end_ns, stage, args FROM ({_TABLES[table]} "
            f"WHERE attempt = ? AND {choice.rank_condition}) WHERE begin_ns > 0 AND {part} ORDER BY rank, begin_ns",
            [attempt],
        ):
            thread = _thread(table, begin_ns, end_ns, stage, lanes.setdefault(rank, []))
            yield from tracks.thread(rank, thread)
            yield _slice(rank, thread, name, clock.us(begin_ns), None if end_ns is None else end_ns - begin_ns, args)
            if end_ns is None:
                never_ended.append((rank, thread, text(name)))
            if table == "steps" and end_ns is not None and args["memory_mib"] is not None:
                yield {"ph": "C", "name": "memory (MiB)", "pid": rank, "ts": clock.us(max(begin_ns, end_ns)),
                       "args": {"MiB": args["memory_mib"]}}  # fmt: skip
            if table == "collectives":
                flows.add(Call(
                    attempt=attempt, rank=rank, thread=thread, op=str(name), group=args["group"],
                    number=args["number"], peer=args["peer"], begin_ns=begin_ns, end_ns=end_ns,
                ))  # fmt: skip
        yield from flows.drain(clock)


def _thread(table: str, begin_ns: int, end_ns: int | None, stage: int | None, busy: list[int]) -> int:
    """Return the thread of the trace in which a record is drawn. `busy`: {lane of the rank: end of its last call}."""
    if table == "steps":
        return STEPS
    if table == "spans":
        return PHASES if stage is None else STAGES + stage % 800  # below `CALLS`
    until = 1 << 62 if end_ns is None else end_ns
    for lane, free_ns in enumerate(busy):
        if free_ns <= begin_ns:
            busy[lane] = until
            return CALLS + lane
    busy.append(until)
    return CALLS + len(busy) - 1


def _slice(rank: int, thread: int, name: Any, ts: float, length_ns: int | None, args: Any) -> dict[str, Any]:
    event = {"ph": "B" if length_ns is None else "X", "name": text(name), "pid": rank, "tid": thread, "ts": ts}
    if length_ns is not None:
        event["dur"] = max(0, length_ns) / 1e3
    return event | {"args": plain({key: value for key, value in args.items() if value is not None})}
