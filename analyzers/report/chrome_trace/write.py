"""A run as a Chrome trace, which opens in the Perfetto UI or chrome://tracing.

    write_trace(store, Path("trace.json.gz"), steps=(38, 42), compressed=True)

Each rank is a process of the trace. The threads of a rank are the steps, the phases, the stages of the pipeline, and
the collectives (in several lanes if they overlap). Arrows join the ranks of one call. A record that never ended is a
slice without an end. Memory, loss, tokens per second and load of devices are counters; events of the run are instants.
One more process shows the run with its attempts, and there is one process for each node.

The file is written in pieces of about `CHUNK_ROWS` records, so that memory is bounded whatever the run's length. Times
are microseconds since the run's first record, by each rank's clock.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from analyzers.figures.course import story
from analyzers.report.chrome_trace.choice import TraceChoice
from analyzers.report.chrome_trace.clock import TraceClock, attempt_times
from analyzers.report.chrome_trace.counters import device_counters, run_counters
from analyzers.report.chrome_trace.plain_values import plain, text
from analyzers.report.chrome_trace.slices import slices
from analyzers.report.chrome_trace.tracks import ATTEMPTS, EVENTS, RUN, STEPS, Tracks, places_of
from analyzers.source import Source

__all__ = ["write_trace"]


def write_trace(
    source: Source,
    path: Path,
    *,
    steps: tuple[int, int] | None = None,
    attempt: int | None = None,
    ranks: Collection[int] = (),
    compressed: bool = False,
) -> int:
    """Write the trace of the given steps, attempt and ranks (None: all) and return its number of events. Raises
    OSError.
    """
    choice = TraceChoice(steps=steps, attempt=attempt, ranks=frozenset(ranks))
    if compressed:
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as packed:
            return _write(packed, source, choice)
    with path.open("w", encoding="utf-8") as file:
        return _write(file, source, choice)


def _write(file: TextIO, source: Source, choice: TraceChoice) -> int:
    num = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in _events(source, choice):
        file.write((",\n" if num else "\n") + json.dumps(event, allow_nan=False, separators=(",", ":")))
        num += 1
    file.write("\n]}\n")
    return num


def _events(source: Source, choice: TraceChoice) -> Iterator[dict[str, Any]]:
    clock = TraceClock.of(source)
    tracks = Tracks(places_of(source))
    times = attempt_times(source)
    yield from _attempts(choice, choice.window(source), clock, tracks, times)
    yield from slices(source, choice, clock, tracks, {attempt: end_ns for attempt, (_, end_ns) in times.items()})
    yield from run_counters(source, choice, clock, tracks)
    yield from device_counters(source, choice, clock, tracks)
    yield from _instants(source, choice, clock, tracks)


def _attempts(
    choice: TraceChoice,
    window: tuple[int, int] | None,
    clock: TraceClock,
    tracks: Tracks,
    times: Mapping[int, tuple[int, int]],
) -> Iterator[dict[str, Any]]:
    """A slice for each attempt, from its first to its last record, cut to the chosen steps."""
    for attempt, (begin_ns, end_ns) in times.items():
        if window is not None:
            begin_ns, end_ns = max(begin_ns, window[0]), min(end_ns, window[1])
        if end_ns >= begin_ns and choice.attempt in (None, attempt):
            yield from tracks.thread(RUN, ATTEMPTS)
            yield {
                "ph": "X", "name": f"attempt {attempt}", "pid": RUN, "tid": ATTEMPTS, "ts": clock.us(begin_ns),
                "dur": (end_ns - begin_ns) / 1e3, "args": {},
            }  # fmt: skip


def _instants(source: Source, choice: TraceChoice, clock: TraceClock, tracks: Tracks) -> Iterator[dict[str, Any]]:
    """Events of the run. If steps are chosen, return the events of these steps, and events without a step that happened
    during them."""
    window = choice.window(source)
    for event in story(source, limit=5_000):
        if not choice.contains(event) or event.wall_ns < clock.zero_ns:
            continue
        if window is not None and event.step is None and not window[0] <= event.wall_ns <= window[1]:
            continue
        is_node = event.rank < 0
        pid, tid = (RUN, EVENTS) if is_node else (event.rank, STEPS)
        yield from tracks.thread(pid, tid)
        yield {
            "ph": "i", "name": text(event.kind), "pid": pid, "tid": tid, "ts": clock.us(event.wall_ns),
            "s": "g" if is_node else "p", "args": plain(event.detail),
        }  # fmt: skip
