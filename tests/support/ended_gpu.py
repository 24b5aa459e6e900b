"""Replayed GPU runs (tests/support/replayed_gpu.py) that have ended, with the events of launchers and `watch`.

run = ended_run("stamped_none", tmp_path, Stop(step=30))                        # Ctrl-C after a minute
run = ended_run("stamped_none", tmp_path, Stop(on="host"), end=Ended(signal="SIGKILL"))
shift_calls(run, rank=1, seq=122, by=1)                                         # it skips a call
run = restarted_run("stamped_none", tmp_path, Stop(on="host"), end=Ended(signal="SIGKILL"))     # and finishes then
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.writer import EMPTY, HEADER_BYTES, OPEN
from probes.tape.rundir import RunDir
from tests.support.recorded_stamps import RANKS
from tests.support.replayed_gpu import NULL, Delay, Restart, Stop, add_attempt, replayed_run

RESTART_S = 30
"""Seconds from the start of an attempt to the start of the next."""
_NODE_EVENTS = ("metrics_served", "watch_started")
_GPU = "GPU-1"
_EXIT_CODES = {"SIGKILL": -9, "SIGABRT": -6}
_IDENTITY = ("count", "function", "dtype", "algorithm", "protocol", "enqueue_ns", "launched_ns")


class Ended(NamedTuple):
    """How a rank ended: by a signal, with a code, or with an exception of this type. `xid`: of the shared GPU."""

    rank: int = 1
    signal: str | None = None
    code: int = 1
    error: str = ""
    xid: int = 0


def ended_run(
    name: str, into: Path, *faults: Delay | Stop, end: Ended | None = None, is_stamped: bool = True, after_s: int = 60
) -> RunDir:
    """Write the run and its end: that of a rank, or Ctrl-C after `after_s` seconds."""
    run = replayed_run(name, into, *faults, is_stamped=is_stamped)
    folders = [run.rank_dir(0, rank) for rank in range(RANKS)]
    for folder in folders:
        for _, rows in tapes(folder, "nccl_communicators"):
            used = rows["state"] != EMPTY
            rows["finalized_ns"][used], rows["state"][used] = NULL, OPEN
    pids = [json.loads((folder / "events.jsonl").read_text().splitlines()[0])["pid"] for folder in folders]
    (node,) = run.path.glob("tapes/node-*/events.jsonl")
    lines = [json.loads(line) for line in node.read_text().splitlines()]
    shift_ns = lines[0]["wall_ns"] - lines[0]["mono_ns"]
    at_ns = max(_last_ns(folder) for folder in folders) + shift_ns
    events = [line for line in lines if line["kind"] in _NODE_EVENTS]

    def add(kind: str, after_ns: int, **fields: Any) -> None:
        times = {"wall_ns": at_ns + after_ns, "mono_ns": at_ns + after_ns - shift_ns}
        events.append(times | {"attempt": 0, "rank": -1, "kind": kind, "step": None} | fields)

    if end is None:
        add("watch_stopped", after_s * 10**9, pid=2)
        add("run_ended", after_s * 10**9 + 1, node_rank=0, reason="interrupted", exit_code=130)
    else:
        if end.error:
            _raise(folders[end.rank] / "events.jsonl", at_ns + 10**6, end)
        code = _EXIT_CODES[end.signal] if end.signal else end.code
        if end.xid:
            for folder in folders:
                first, *others = (folder / "events.jsonl").read_text().splitlines()
                named = json.dumps(json.loads(first) | {"device_uuid": _GPU})
                (folder / "events.jsonl").write_text("\n".join([named, *others]) + "\n")
            add("xid", 4 * 10**8, xid=end.xid, device=_GPU, node="vm", message=f"XID {end.xid}, reported by NVML")
        add("rank_exit", 6 * 10**8, exit_rank=end.rank, pid=pids[end.rank], exit_code=code,
            signal=end.signal, message="", out_of_memory=None, blamed=False)  # fmt: skip
        add("rank_stopped", 8 * 10**8, exit_rank=1 - end.rank, pid=pids[1 - end.rank], exit_code=-15)
        add("watch_stopped", 9 * 10**8, pid=2)
        add("run_ended", 3 * 10**9, node_rank=0, reason="failed", exit_code=1)
    node.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


def restarted_run(
    name: str,
    into: Path,
    *faults: Delay | Stop,
    end: Ended,
    later_faults: Sequence[Delay] = (),
    first_step: int = 21,
    is_stamped: bool = True,
) -> RunDir:
    """Write a run whose second attempt begins at `first_step`, has `later_faults` (in steps of the recording,
    from 1), and finishes."""
    run = ended_run(name, into, *faults, end=end, is_stamped=is_stamped)
    restart = Restart(attempt=1, first_step=first_step, later_ns=RESTART_S * 10**9)
    add_attempt(run, name, later_faults, restart, is_stamped=is_stamped)
    first = json.loads((run.path / "attempts" / "00000.json").read_text())
    later = first | {"wall_ns": first["wall_ns"] + restart.later_ns}
    (run.path / "attempts" / "00001.json").write_text(json.dumps(later))
    folders = [run.rank_dir(1, rank) for rank in range(RANKS)]
    (node,) = run.path.glob("tapes/node-*/events.jsonl")
    events = [json.loads(line) for line in node.read_text().splitlines()]
    shift_ns = events[0]["wall_ns"] - events[0]["mono_ns"]
    events = [event for event in events if event["kind"] not in ("watch_stopped", "run_ended")]

    def add(kind: str, mono_ns: int, **fields: Any) -> None:
        times = {"wall_ns": mono_ns + shift_ns, "mono_ns": mono_ns}
        events.append(times | {"attempt": 1, "rank": -1, "kind": kind, "step": None} | fields)

    over_ns = max(map(_last_ns, folders))
    begun_ns = min(int(rows["start_ns"][rows["state"] != EMPTY].min()) for _, rows in tapes(folders[0], "steps"))
    add("attempt_started", begun_ns - 10**9, world_size=RANKS, node_rank=0, ranks_left_over=0)
    for rank in range(RANKS):
        add("rank_exit", over_ns + 10**8, exit_rank=rank, pid=rank + 3, exit_code=0,
            signal=None, message="", out_of_memory=None, blamed=False)  # fmt: skip
    add("watch_stopped", over_ns + 2 * 10**8, pid=2)
    add("run_ended", over_ns + 3 * 10**8, node_rank=0, reason="finished", exit_code=0)
    node.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


def shift_calls(run: RunDir, rank: int, seq: int, by: int) -> None:
    """Let a rank skip `by` calls from this number on, or, if negative, repeat the call."""
    ((_, rows),) = tapes(run.rank_dir(0, rank), "nccl_calls")
    last = int(np.flatnonzero(rows["state"] != EMPTY)[-1])
    made = np.arange(seq, last + 1 - max(by, 0))
    for name in _IDENTITY:
        rows[name][made] = rows[name][np.maximum(made + by, seq)].copy()
    rows["state"][made[-1] + 1 :] = EMPTY


def tapes(folder: Path, table: str) -> list[tuple[Path, npt.NDArray[Any]]]:
    """(path, writable records) of a table's tapes."""
    found = []
    for path in segment_paths(folder, table):
        header = read_segment(path).header
        found.append((path, np.memmap(path, header.dtype, "r+", HEADER_BYTES, (header.capacity,))))
    return found


def _last_ns(folder: Path) -> int:
    """Monotonic time of a rank's newest record."""
    columns = {"spans": ("start_ns", "end_ns"), "nccl_calls": ("launched_ns", "kernel_end_ns")}
    return max(
        int(rows[name][rows["state"] != EMPTY].max())
        for table, names in columns.items()
        for _, rows in tapes(folder, table)
        for name in names
    )


def _raise(path: Path, at_ns: int, end: Ended) -> None:
    first = json.loads(path.read_text().splitlines()[0])
    trace = f'Traceback (most recent call last):\n  File "gpu_loop.py", line 74, in <module>\n{end.error}: no\n'
    event = {
        "wall_ns": at_ns, "mono_ns": at_ns - first["clock_offset_ns"], "attempt": 0, "rank": end.rank,
        "kind": "exception", "step": None, "type": end.error, "message": "no", "traceback": trace, "phase": "optimizer",
    }  # fmt: skip
    with path.open("a") as file:
        file.write(f"{json.dumps(event)}\n")
