"""A run as a Chrome trace: opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

    write_trace(store, Path("trace.json.gz"), steps=(38, 42), compressed=True)

A process of the trace is a rank; its threads are its steps, its phases, each stage of its pipeline, and its
collectives, in as many lanes as overlap. What never ended is a slice without an end. Events of the run are instants.

The file is written in pieces of about `CHUNK_ROWS` records, so that memory is bounded whatever the run's length. Times
are microseconds since the run's first record, of each rank's own clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from analyzers.figures.course import StoryEvent, story
from analyzers.printable import visible
from analyzers.source import Source

__all__ = ["write_trace"]

CHUNK_ROWS = 20_000
"""Records read at a time."""
MAX_TEXT = 200
_STEPS, _PHASES, _STAGES, _CALLS = 0, 1, 100, 1000
"""Numbers of a rank's threads: steps, phases, first stage, first lane of collectives."""
_TABLES = {
    "steps": "SELECT rank, step, 'step ' || step AS name, start_ns AS begin_ns, start_ns + duration_ns AS end_ns, "
    "NULL AS stage, {'loss': loss, 'committed': committed, 'waited_ms': collective_wait_ns / 1e6} AS args FROM steps",
    "spans": "SELECT rank, step, kind AS name, start_ns AS begin_ns, end_ns, stage, "
    "{'step': step, 'microbatch': microbatch, 'waited_ms': wait_ns / 1e6} AS args FROM spans",
    "collectives": "SELECT rank, step, op AS name, issue_ns AS begin_ns, end_ns, NULL AS stage, {'step': step, "
    "'group': process_group, 'number': seq, 'bytes': bytes, 'dtype': dtype, 'shape': shape, 'peer': peer, "
    "'caller': caller, 'waited_ms': wait_ns / 1e6} AS args FROM collectives",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Part of the run in the trace; None and empty: everything."""

    steps: tuple[int, int] | None = None
    attempt: int | None = None
    ranks: frozenset[int] = frozenset()

    @property
    def of_ranks(self) -> str:
        """The ranks in SQL."""
        listed = ", ".join(str(int(rank)) for rank in sorted(self.ranks))
        return f"rank IN ({listed})" if listed else "rank >= 0"

    @property
    def condition(self) -> str:
        """All of it in SQL."""
        parts = [self.of_ranks]
        if self.steps is not None:
            parts.append(f"step BETWEEN {int(self.steps[0])} AND {int(self.steps[1])}")
        if self.attempt is not None:
            parts.append(f"attempt = {int(self.attempt)}")
        return " AND ".join(parts)

    def holds(self, told: StoryEvent) -> bool:
        """True if an event belongs to it; events of a node always do."""
        return (
            (self.steps is None or told.step is None or self.steps[0] <= told.step <= self.steps[1])
            and self.attempt in (None, told.attempt)
            and (not self.ranks or told.rank < 0 or told.rank in self.ranks)
        )


def write_trace(
    source: Source,
    path: Path,
    *,
    steps: tuple[int, int] | None = None,
    attempt: int | None = None,
    ranks: Collection[int] = (),
    compressed: bool = False,
) -> int:
    """Write the trace, of all or of the steps, attempt and ranks given; its number of events. Raises OSError."""
    choice = _Choice(steps=steps, attempt=attempt, ranks=frozenset(ranks))
    if compressed:
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as packed:
            return _write(packed, source, choice)
    with path.open("w", encoding="utf-8") as file:
        return _write(file, source, choice)


def _write(file: TextIO, source: Source, choice: _Choice) -> int:
    num = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in _events(source, choice):
        file.write((",\n" if num else "\n") + json.dumps(event, allow_nan=False, separators=(",", ":")))
        num += 1
    file.write("\n]}\n")
    return num


def _events(source: Source, choice: _Choice) -> Iterator[dict[str, Any]]:
    zero_ns = _zero(source)
    threads: set[tuple[int, int]] = set()
    for table in _TABLES:
        if not source.has(table):
            continue
        lanes: dict[int, list[int]] = {}
        for attempt, part in _parts(source, table, choice):
            for row in source.rows(
                f"SELECT rank, name, begin_ns, end_ns, stage, args FROM ({_TABLES[table]} "
                f"WHERE attempt = ? AND {choice.of_ranks}) WHERE begin_ns IS NOT NULL AND {part} "
                "ORDER BY rank, begin_ns",
                [attempt],
            ):
                rank, name, begin_ns, end_ns, stage, args = row
                thread = _thread(table, rank, begin_ns, end_ns, stage, lanes)
                yield from _introduced(threads, rank, thread)
                yield _slice(rank, thread, name, begin_ns - zero_ns, None if end_ns is None else end_ns - zero_ns, args)
    for told in story(source, limit=5_000):
        if choice.holds(told):
            yield {
                "ph": "i", "name": _text(told.kind), "pid": max(0, told.rank), "tid": _STEPS,
                "ts": (told.wall_ns - zero_ns) / 1e3, "s": "g" if told.rank < 0 else "p", "args": _plain(told.detail),
            }  # fmt: skip


def _thread(
    table: str, rank: int, begin_ns: int, end_ns: int | None, stage: int | None, lanes: dict[int, list[int]]
) -> int:
    if table == "steps":
        return _STEPS
    if table == "spans":
        return _PHASES if stage is None else _STAGES + stage % 800
    busy = lanes.setdefault(rank, [])  # when the last call of each lane ended
    until = 1 << 62 if end_ns is None else end_ns
    for lane, free_ns in enumerate(busy):
        if free_ns <= begin_ns:
            busy[lane] = until
            return _CALLS + lane
    busy.append(until)
    return _CALLS + len(busy) - 1


def _introduced(threads: set[tuple[int, int]], rank: int, thread: int) -> Iterator[dict[str, Any]]:
    """Names of a process and a thread, the first time that they are met."""
    if (rank, thread) in threads:
        return
    if not any(known == rank for known, _ in threads):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    threads.add((rank, thread))
    name = {_STEPS: "steps", _PHASES: "phases"}.get(thread)
    if name is None:
        name = f"collectives {thread - _CALLS}" if thread >= _CALLS else f"stage {thread - _STAGES}"
    yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _slice(rank: int, thread: int, name: Any, begin_ns: int, end_ns: int | None, args: Any) -> dict[str, Any]:
    event = {
        "ph": "B" if end_ns is None else "X",
        "name": _text(name),
        "pid": rank,
        "tid": thread,
        "ts": begin_ns / 1e3,
    }
    if end_ns is not None:
        event["dur"] = max(0, end_ns - begin_ns) / 1e3
    return event | {"args": _plain({key: value for key, value in args.items() if value is not None})}


def _parts(source: Source, table: str, choice: _Choice) -> Iterator[tuple[int, str]]:
    """(attempt, condition) of pieces of about `CHUNK_ROWS` records: ranges of steps, and what belongs to no step."""
    for attempt, num_rows, first, last in source.rows(
        f"SELECT attempt, count(*), min(step), max(step) FROM {table} WHERE {choice.condition} GROUP BY 1 ORDER BY 1"
    ):
        if choice.steps is None:
            yield attempt, "step IS NULL"
        if first is None:
            continue
        length = max(1, (last - first + 1) * CHUNK_ROWS // max(1, num_rows))
        for begin in range(first, last + 1, length):
            yield attempt, f"step BETWEEN {begin} AND {min(last, begin + length - 1)}"


def _zero(source: Source) -> int:
    begins = {"ranks": "wall_ns", "steps": "start_ns", "spans": "start_ns", "collectives": "issue_ns"}
    times = [source.rows(f"SELECT min({of}) FROM {table}")[0][0] for table, of in begins.items() if source.has(table)]
    return min((time for time in times if time), default=0)


def _text(value: Any) -> str:
    return visible(str(value)[: 4 * MAX_TEXT])[:MAX_TEXT]


def _plain(value: Any, depth: int = 0) -> Any:
    """JSON values of bounded size."""
    if isinstance(value, dict):
        return {_text(key): _plain(item, depth + 1) for key, item in list(value.items())[:50]} if depth < 4 else "..."
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value[:50]] if depth < 4 else "..."
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return value if value is None or isinstance(value, (bool, int)) else _text(value)
