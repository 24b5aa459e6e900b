"""Slowdown of a pipeline job from its recorded operations: S, S_w, M_W and M_S of Lin et al. (OSDI 2025).

    found = what_if_of_operations(read_operations(path))
    found.slowdown, found.worst_ranks_ratio, found.last_stage_ratio       # S, M_W, M_S

Each step is replayed over the dependencies of its operations (`whatif.simulate`), one program per stream:

1. Computation runs in its recorded order. A forward or backward pass waits for its receive. A send waits for its pass.
2. A send and its receive end together, when both have begun and the transfer is over.
3. Operations between data-parallel ranks of a stage begin when the last rank has arrived. The first and the last stage
   exchange embedding gradients. Clipping needs the norm of all ranks' gradients.
4. A reduction that began before the last pass ended runs in parallel with the passes. It starts after the last
   backward pass of its chunk.

In a balanced job, as in the paper, every computation takes the mean of its type over data-parallel ranks, stages and
steps. Every transfer takes the median of its type. M_W is the share of the slowdown that disappears if the operations
of the worst 3 % of the workers take their balanced times. M_S is the same for the last stage. Idle time that no
dependency explains is not replayed and is part of the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from analyzers.source import Floats, Ints
from analyzers.whatif.policy import WhatIfPolicy
from analyzers.whatif.simulate import Graph, step_ends
from analyzers.whatif.what_if import WhatIf, removed_share
from store.readers.operations import Operations
from store.readers.untrusted.external_files import SourceError

__all__ = ["what_if_of_operations"]

MAX_OPERATIONS = 3_000_000
"""Maximum number of operations that are replayed in total; of larger jobs fewer steps are replayed."""
PASSES = ("forward-compute", "backward-compute")
MESSAGES = ("forward-recv", "forward-send", "backward-recv", "backward-send")
SYNCS = ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce", "grads-sync", "params-sync")
EMBEDDING = "embedding-grads-all-reduce"
NORM = "optimizer-clip-main-grad"
MEDIANS = (*MESSAGES, *SYNCS, EMBEDDING, NORM, "layernorm-grads-all-reduce")
_GATHERS = ("params-all-gather", "params-sync")
_REDUCES = ("grads-reduce-scatter", "grads-sync")
Key = tuple[object, ...]


@dataclass(slots=True)
class _Step:
    """The graph of a step. `rows_of_work` and `rows_of_call` say which rows hold the durations of its pieces of work
    and calls."""

    graph: Graph = field(default_factory=Graph)
    rows_of_work: list[int] = field(default_factory=list)
    rows_of_call: list[list[int]] = field(default_factory=list)
    calls: dict[Key, int] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)
    """Call of each send and receive, by row."""

    def call(self, key: Key) -> int:
        """Return the call with this key; add it if it is new. The key is a transfer's, or ("end", row) for an end."""
        if key not in self.calls:
            self.calls[key] = self.graph.new_call((key[0],), 0.0)
            self.rows_of_call.append([])
        return self.calls[key]

    def takes(self, values: Floats) -> float:
        """Milliseconds until the last operation ends, given the times of all rows."""
        transfers = [max((values[row] for row in rows), default=0.0) for rows in self.rows_of_call]
        ends = step_ends(self.graph, values[self.rows_of_work].tolist(), transfers)
        if np.isnan(ends).any():
            raise SourceError("holds operations that wait for each other: sends and receives do not match")
        return float(ends.max())


def what_if_of_operations(jobs: Operations, policy: WhatIfPolicy | None = None) -> WhatIf:
    """The what-if of a job. Raises SourceError if it lacks passes of at least two workers."""
    policy = policy or WhatIfPolicy()
    workers = np.unique(jobs.dp_rank * (int(jobs.stage.max()) + 1) + jobs.stage)
    if len(workers) < 2 or not set(PASSES) & set(jobs.optype):
        raise SourceError("holds no forward and backward passes of two workers or more")
    num_dp, num_stages = len(np.unique(jobs.dp_rank)), len(np.unique(jobs.stage))
    steps = _steps_to_replay(jobs, num_dp + num_stages + 4)
    graphs: list[_Step] = []
    own = jobs.duration_ms.copy()
    for step in steps:
        graphs.append(_graph(jobs, np.flatnonzero(jobs.step == step), own))
    used = np.isin(jobs.step, steps)
    ideal = _balanced(jobs, own, used)

    def mean_ms(values: Floats) -> float:
        return float(np.mean([one.takes(values) for one in graphs]))

    ran, balanced = mean_ms(own), max(mean_ms(ideal), 1e-9)
    measured = float(np.mean([_measured_ms(jobs, step) for step in steps]))
    by_rank = _by_rank(jobs, lambda kept: mean_ms(np.where(kept, own, ideal)) / balanced)
    num_worst = max(1, math.ceil(policy.worst_share_ratio * len(workers)))
    worst = tuple(sorted(list(by_rank)[:num_worst]))

    error_ratio = abs(ran / measured - 1) if measured else 1.0

    def removed(chosen: npt.NDArray[np.bool_]) -> float | None:
        return removed_share(ran, balanced, mean_ms(np.where(chosen, ideal, own)), error_ratio)

    return WhatIf(
        attempt=0, first_step=int(min(steps)), last_step=int(max(steps)), basis="operations",
        error_ratio=error_ratio, step_ms=measured,
        ideal_step_ms=measured * balanced / ran if ran else measured, slowdown=ran / balanced, by_rank=by_rank,
        worst_ranks=worst, worst_ranks_ratio=removed(np.isin(jobs.rank, worst)),
        last_stage_ratio=removed(jobs.stage == jobs.stage.max()) if num_stages > 1 else None,
        has_stages=num_stages > 1,
    )  # fmt: skip


def _steps_to_replay(jobs: Operations, num_replays: int) -> list[int]:
    """Steps with at least half as many operations as the largest step. If the limit does not allow all of them, the
    last ones are taken."""
    steps, counts = np.unique(jobs.step, return_counts=True)
    whole = [int(step) for step, count in zip(steps, counts, strict=True) if count >= 0.5 * counts.max()]
    most = max(1, int(MAX_OPERATIONS // max(1, num_replays * int(counts.max()))))
    return whole[-most:]


def _measured_ms(jobs: Operations, step: int) -> float:
    rows = jobs.step == step
    return float((jobs.start_ms[rows] + jobs.duration_ms[rows]).max() - jobs.start_ms[rows].min())


def _balanced(jobs: Operations, own: Floats, used: npt.NDArray[np.bool_]) -> Floats:
    ideal = own.copy()
    for number, name in enumerate(jobs.optype):
        rows = (jobs.kind == number) & used
        if rows.any():
            ideal[rows] = np.median(own[rows]) if name in MEDIANS else own[rows].mean()
    return ideal


def _by_rank(jobs: Operations, slowdown: Callable[[npt.NDArray[np.bool_]], float]) -> dict[int, float]:
    """S_w per rank, largest first: the smaller of the slowdowns of its data-parallel rank and its stage."""
    by_dp_rank = {int(dp_rank): slowdown(jobs.dp_rank == dp_rank) for dp_rank in np.unique(jobs.dp_rank)}
    by_stage = {int(stage): slowdown(jobs.stage == stage) for stage in np.unique(jobs.stage)}
    if len(by_stage) == 1:
        by_stage = dict.fromkeys(by_stage, math.inf)
    if len(by_dp_rank) == 1:
        by_dp_rank = dict.fromkeys(by_dp_rank, math.inf)
    places = np.unique(np.stack([jobs.rank, jobs.dp_rank, jobs.stage]), axis=1).T
    found = {int(rank): min(by_dp_rank[int(dp_rank)], by_stage[int(stage)]) for rank, dp_rank, stage in places}
    return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))


def _graph(jobs: Operations, rows: Ints, own: Floats) -> _Step:
    """Build a step's graph. In `own` the durations of calls are replaced by their transfer times, without waits."""
    built = _Step()
    names = [jobs.optype[kind] for kind in jobs.kind[rows]]
    workers: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for row, name in zip(rows.tolist(), names, strict=True):
        workers.setdefault((int(jobs.dp_rank[row]), int(jobs.stage[row])), []).append((row, name))
    last_chunk = int(jobs.chunk[rows].max())
    for number, (worker, operations) in enumerate(sorted(workers.items())):
        _Worker(jobs, built, worker, operations, last_chunk).program(number * len(_STREAMS))
    end = jobs.start_ms + jobs.duration_ms
    for key, call in built.calls.items():
        members = built.rows_of_call[call]
        if members:
            begin = float(jobs.start_ms[members].max())
            for row in members:
                own[row] = max(0.0, float(end[row]) - begin)
            if key[0] == "message":  # only the receiver of a message waits
                built.rows_of_call[call] = [row for row in members if jobs.optype[jobs.kind[row]].endswith("recv")]
    return built


_STREAMS = ("compute", "sync", *MESSAGES)


class _Worker:
    """The programs of one worker's streams in a step."""

    def __init__(
        self,
        jobs: Operations,
        step: _Step,
        worker: tuple[int, int],
        operations: Sequence[tuple[int, str]],
        last_chunk: int,
    ) -> None:
        self._jobs, self._step, self._worker, self._last_chunk = jobs, step, worker, last_chunk
        self._operations = list(operations)
        """(Row, type) of each operation, in recorded order."""
        self._passes = [(row, name) for row, name in operations if name in PASSES]
        self._seen: dict[str, int] = {}
        self._dependencies: dict[int, list[int]] = {}

    def program(self, first: int) -> None:
        """Add this worker's streams; `first` is the number of its first stream."""
        streams: dict[str, list[tuple[int, str]]] = {name: [] for name in _STREAMS}
        for row, name in self._operations:
            streams[self._stream(row, name)].append((row, name))
        for direction in ("forward", "backward"):
            self._match(direction, streams)
        self._match_syncs(streams["sync"])
        reduces = [row for row, name in streams["sync"] if name not in _GATHERS]
        tail = next((row for row, name in streams["compute"] if name not in PASSES), None)
        if tail is not None:
            self._dependencies.setdefault(tail, []).extend(reduces)
        for offset, stream in enumerate(_STREAMS):
            for row, name in streams[stream]:
                self._add(first + offset, row, name)
            if streams[stream]:
                self._step.graph.end_step(first + offset, 0)

    def _stream(self, row: int, name: str) -> str:
        if name in MESSAGES:
            return name
        if name in _GATHERS:
            return "sync"
        if name in _REDUCES and self._passes:
            jobs, last = self._jobs, self._passes[-1][0]
            return "sync" if jobs.start_ms[row] < jobs.start_ms[last] + jobs.duration_ms[last] - 1e-6 else "compute"
        return "compute"

    def _match(self, direction: str, streams: dict[str, list[tuple[int, str]]]) -> None:
        """Match sends and receives to passes, in order. Messages at both ends of the model are left out, because
        nothing is sent there."""
        jobs = self._jobs
        passes = [row for row, name in self._passes if name == f"{direction}-compute"]
        place = {row: number for number, row in enumerate(passes)}
        edge = {("forward", "recv"): 0, ("forward", "send"): self._last_chunk,
                ("backward", "recv"): self._last_chunk, ("backward", "send"): 0}  # fmt: skip
        counted: dict[int, int] = {}
        ordinal: dict[int, int] = {}
        for row in passes:
            chunk = int(jobs.chunk[row])
            ordinal[row] = int(jobs.microbatch[row]) if jobs.microbatch[row] >= 0 else counted.get(chunk, 0)
            counted[chunk] = counted.get(chunk, 0) + 1
        for way in ("recv", "send"):
            name = f"{direction}-{way}"
            messages = [row for row, _ in streams[name]]
            inner = [row for row in passes if int(jobs.chunk[row]) != edge[direction, way]]
            # Some traces list a message for every pass, even at the ends of the model, where none is sent.
            matched = inner if len(messages) != len(passes) else passes
            kept: list[tuple[int, str]] = []
            for message, row in zip(messages, matched, strict=False):
                if row not in inner:
                    continue
                chunk = int(jobs.chunk[row])
                to_next = 1 if direction == "forward" else -1
                target = chunk if way == "recv" else chunk + to_next
                call = self._step.call(("message", direction, self._worker[0], target, ordinal[row]))
                self._step.rows_of_call[call].append(message)
                self._step.messages[message] = call
                self._depend(message, row, way, passes[place[row] - 1] if place[row] else None)
                kept.append((message, name))
            streams[name] = kept

    def _depend(self, message: int, row: int, way: str, before: int | None) -> None:
        """Make a send wait for its pass, or a pass wait for its receive. A receive begins when the rank's previous pass
        has ended; `before` is the row of that pass."""
        if way == "send":
            self._dependencies.setdefault(message, []).append(row)
            return
        self._dependencies.setdefault(row, []).append(message)
        if before is not None:
            self._dependencies.setdefault(message, []).append(before)

    def _match_syncs(self, syncs: Sequence[tuple[int, str]]) -> None:
        jobs = self._jobs
        for row, name in syncs:
            # A gather comes before the first forward pass of its chunk, and a reduction after the last backward pass.
            # If there is only one operation, it is for all chunks.
            pass_name = PASSES[0] if name in _GATHERS else PASSES[1]
            of_chunk = [one for one, kind in self._passes if kind == pass_name
                        and (jobs.chunk[one] == jobs.chunk[row] or len(syncs) == 1)]  # fmt: skip
            if not of_chunk:
                continue
            if name in _GATHERS:
                self._dependencies.setdefault(of_chunk[0], []).append(row)
            else:
                self._dependencies.setdefault(row, []).append(of_chunk[-1])

    def _add(self, stream: int, row: int, name: str) -> None:
        step, graph = self._step, self._step.graph
        for other in self._dependencies.get(row, ()):
            graph.add_wait(stream, step.call(("end", other)))
        call = self._call(row, name)
        if call is None:
            graph.add_work(stream, 0, 0, 0.0)
            step.rows_of_work.append(row)
        else:
            graph.add_post(stream, call)
            graph.add_wait(stream, call)
        graph.add_post(stream, step.call(("end", row)))

    def _call(self, row: int, name: str) -> int | None:
        step, (dp_rank, stage) = self._step, self._worker
        if name in MESSAGES:
            return step.messages[row]
        if name not in (*SYNCS, EMBEDDING, NORM):
            return None
        count = self._seen[name] = self._seen.get(name, -1) + 1
        call = step.call((name, 0 if name == NORM else dp_rank if name == EMBEDDING else stage, count))
        step.rows_of_call[call].append(row)
        return call
