"""Records of a run's end: by the ranks that die, the launcher, `watch`, and the backend's timeouts.

    write_end(recording, engine)

The fault's `ending` says how a hang ends: `frozen` (the machine or the job disappears, nothing more is written),
`interrupted` (a user stops the job), `timeout` (the collectives' timeout makes the waiting ranks raise). The launcher
sees the death of a process within its interval; over gloo its peers lose their connections at once, over NCCL they wait
until the launcher ends them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .faults import DEATHS, FREEZES

if TYPE_CHECKING:
    from .engine import Engine
    from .recording import Recording

__all__ = ["write_end"]

S = 1e9
NODE = -1
LAUNCHER_INTERVAL_S = 0.1
WATCH_INTERVAL_S = 1.0
HOLD_S = 600.0
"""Length of a hang before it ends: NCCL's default timeout, and about how often people check."""

_ENDS = {
    "kill": (-9, "SIGKILL", "", ""),
    "segfault": (-11, "SIGSEGV", "", ""),
    "exception": (1, None, "RuntimeError", "shape '[4, 2048]' is invalid for input of size 8191"),
    "out_of_memory": (
        1, None, "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is "
        "free.",
    ),
    "data_exhausted": (1, None, "StopIteration", ""),
    "exit": (1, None, "", ""),
}  # fmt: skip
"""Exit code, signal, exception and message of each kind of death."""

_STACKS = {
    "gil": ('File "train.py", line 61 in tokenize_all', 'File "train.py", line 140 in main'),
    "hang": ('File "train.py", line 77 in wait_for_licence', 'File "train.py", line 140 in main'),
    "slow_loader_hang": (
        'File "trainer/data/batches.py", line 52 in read_shard',
        'File "trainer/training/rank_training.py", line 104 in batch',
    ),
    "checkpoint_hang": (
        'File "trainer/checkpoint/disk_tier/checkpoints.py", line 91 in fsync_folder',
        'File "trainer/rank/loop.py", line 66 in train',
    ),
}  # fmt: skip
_WAITING = (
    'File "torch/distributed/distributed_c10d.py", line 3004 in all_reduce',
    'File "trainer/rank/loop.py", line 121 in _agree',
)
_TRACE = 'Traceback (most recent call last):\n  File "trainer/rank/loop.py", line 121, in _agree\nRuntimeError: '


def write_end(recording: Recording, engine: Engine) -> None:
    """Add the last events and set when each rank stopped writing."""
    fault = recording.scenario.fault
    if recording.closed:
        _finish(recording, engine)
    elif fault is not None and fault.kind in DEATHS:
        _die(recording, engine)
    else:
        _hang(recording, engine)


def _event(recording: Recording, rank: int, at: float, kind: str, step: int | None = None, **detail: Any) -> None:
    from .recording import Event

    recording.events.append(Event(rank, at, kind, step, detail))


def _finish(recording: Recording, engine: Engine) -> None:
    end = float(engine.now.max())
    for rank in range(len(engine.now)):
        at = float(engine.now[rank]) + 2e6
        _event(recording, rank, at, "rank_closed", recording.scenario.steps, probe_errors={}, dropped_records={})
    _event(recording, NODE, end + 0.3 * S, "run_ended", None, reason="finished", exit_code=0, message="")
    _event(recording, NODE, end + 1.0 * S, "watch_stopped", None, pid=999)


def _die(recording: Recording, engine: Engine) -> None:
    scenario = recording.scenario
    fault = scenario.fault
    assert fault is not None
    moment = engine.stopped[fault.rank]
    code, signal, kind, message = _ENDS[fault.kind]
    step = fault.step
    if kind:
        trace = f'Traceback (most recent call last):\n  File "train.py", line 140, in main\n{kind}: {message}\n'
        if fault.kind == "data_exhausted":
            trace = f'Traceback (most recent call last):\n  File "loader.py", line 41, in __next__\n{kind}\n'
        _event(recording, fault.rank, moment, "exception", step, type=kind, message=message, traceback=trace)
        recording.until[fault.rank] += 1.0
    seen = moment + LAUNCHER_INTERVAL_S * S * 0.7
    dead = {fault.rank: (code, signal, message)}
    if scenario.backend == "gloo":
        for rank in range(len(engine.now)):
            if rank != fault.rank:
                lost = moment + 0.01 * S + 1e6 * rank
                text = f"[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:{20_000 + rank}"
                trace = f"{_TRACE}{text}\n"
                _event(recording, rank, lost, "exception", step, type="RuntimeError", message=text, traceback=trace)
                recording.until[rank] = lost
                if rank % 3 == 0:  # some have ended as well when the launcher looks
                    dead[rank] = (1, None, text)
    else:
        recording.until[:] = np.minimum(recording.until, seen + 0.5 * S)
    for rank, (exit_code, name, text) in sorted(dead.items(), key=lambda item: item[0] != fault.rank):
        _event(
            recording, NODE, seen, "rank_exit", None,
            exit_rank=rank, pid=10_000 + rank, exit_code=exit_code, signal=name, message=text,
        )  # fmt: skip
    text = f"rank {fault.rank} ended with {signal or f'exit code {code}'}; no restart is left"
    _event(recording, NODE, seen + 1.2 * S, "run_ended", None, reason="failed", exit_code=1, message=text)


def _hang(recording: Recording, engine: Engine) -> None:
    scenario = recording.scenario
    fault = scenario.fault
    assert fault is not None, "a run without a fault stands still"
    last = _last_begin(recording)
    end = last + HOLD_S * S
    if fault.kind == "stop":
        detail = {"state_rank": fault.rank, "pid": 10_000 + fault.rank, "state": "stopped", "os_state": "T"}
        _event(recording, NODE, engine.stopped[fault.rank] + WATCH_INTERVAL_S * S, "rank_state", None, **detail)
    if fault.kind == "data_finished":
        done = float(min(row.start[0] for row in engine.log.steps if row.step == fault.step)) + 1e6
        _event(recording, fault.rank, done, "rank_closed", fault.step - 1, probe_errors={}, dropped_records={})
        recording.until[fault.rank] = done
    _take_stacks(recording, engine, last + 6 * S)
    recording.until[:] = np.minimum(recording.until, end)
    match fault.ending:
        case "interrupted":
            text = "SIGINT received"
            _event(recording, NODE, end, "run_ended", None, reason="interrupted", exit_code=130, message=text)
        case "timeout":
            _time_out(recording, engine, end)


def _last_begin(recording: Recording) -> float:
    """Start of the last call or span of any rank."""
    begins = [row.issue for row in recording.log.collectives] + [row.start for row in recording.log.spans]
    times = np.concatenate(begins)
    return float(times[np.isfinite(times)].max())


def _take_stacks(recording: Recording, engine: Engine, at: float) -> None:
    """`watch` asks all ranks for their stacks; a stopped process does not answer."""
    fault = recording.scenario.fault
    assert fault is not None
    answered = []
    for rank in range(len(engine.now)):
        if fault.rank == rank and fault.kind in ("stop", "data_finished"):
            continue
        stack = _STACKS.get(fault.kind) if rank == fault.rank and fault.kind in FREEZES else None
        frames = "\n".join(f"  {line}" for line in stack or _WAITING)
        recording.stacks[rank] = f"Current thread 0x00007f0000{rank:06x} (most recent call first):\n{frames}\n"
        answered.append(rank)
    _event(recording, NODE, at, "stacks", None, path="stacks", ranks=answered)


def _time_out(recording: Recording, engine: Engine, end: float) -> None:
    """The ranks that wait in a call raise; the others write nothing."""
    scenario, log = recording.scenario, engine.log
    columns = log.columns("collectives", recording.until)
    waiting = np.unique(columns["rank"][columns["state"] == 1]) if columns else np.empty(0, np.int64)
    fault = scenario.fault
    assert fault is not None
    for rank in waiting.tolist():
        text = "Timed out waiting 600000ms for recv operation to complete"
        if scenario.backend == "nccl":
            text = "Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 600020 ms"
        at = end - 1e8 + 1e5 * rank
        trace = f"{_TRACE}{text}\n"
        _event(recording, rank, at, "exception", fault.step, type="RuntimeError", message=text, traceback=trace)
        detail = {"exit_rank": rank, "pid": 10_000 + rank, "exit_code": 1, "signal": None, "message": text}
        _event(recording, NODE, end + 1e7, "rank_exit", None, **detail)
    _event(recording, NODE, end + 2 * S, "run_ended", None, reason="failed", exit_code=1, message="a worker failed")
