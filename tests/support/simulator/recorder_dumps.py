"""Flight-recorder dumps as NCCL writes them: every field of format 2.10, as `FlightRecorderDetail.hpp` fills it.

job = Job(ranks=4)
job.collective("all_reduce", ranks=[0, 1, 2])       # entered and not left: rank 3 is missing
job.write(folder)                                   # nccl_trace_rank_0 ... as the watchdog names them

It simulates what the recorder stores, independently of the analyzers.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["MS", "PREFIX", "START_NS", "Job"]

START_NS = 1_790_000_000 * 10**9
MS = 10**6
PREFIX = "nccl_trace_rank_"
TIMEOUT_MS = 600_000
_TORCH = "/venv/lib/python3.11/site-packages/torch/distributed"
FRAMES = [
    {"name": "all_reduce", "filename": f"{_TORCH}/distributed_c10d.py", "line": 3},
    {"name": "train_step", "filename": "/home/user/project/train.py", "line": 120},
    {"name": "<module>", "filename": "/home/user/project/train.py", "line": 200},
]  # fmt: skip


class Job:
    """All ranks' recorders. Groups are `{name: (description, ranks)}`; "0" is the default one."""

    def __init__(
        self,
        ranks: int = 4,
        *,
        groups: dict[str, tuple[str, list[int]]] | None = None,
        ring: int = 2000,
        backend: str = "nccl",
        version: str = "2.10",
    ) -> None:
        self.num_ranks, self.ring, self.backend, self.version = ranks, ring, backend, version
        self.groups = {"0": ("default_pg", list(range(ranks)))} | (groups or {})
        self.entries: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self.seq: dict[tuple[int, str, str], int] = {}
        self.num_recorded = [0] * ranks
        self.now_ns = START_NS

    def collective(
        self,
        op: str,
        *,
        group: str = "0",
        ranks: Sequence[int] | None = None,
        state: str = "started",
        numel: int = 1024,
        dtype: str = "Float",
        timed_out: bool = False,
    ) -> None:
        """Ranks (all members by default) enter the next collective of a group."""
        self.now_ns += MS
        for rank in self.groups[group][1] if ranks is None else ranks:
            number = self._next(rank, group, "collective")
            self._record(rank, group, op, state, collective=number, p2p=self.seq.get((rank, group, "p2p"), 0),
                         sizes=[[numel]], dtypes=[dtype], retired=timed_out or state == "completed")  # fmt: skip

    def steps(self, count: int, *, group: str = "0") -> None:
        """Finished all_reduces."""
        for _ in range(count):
            self.collective("all_reduce", group=group, state="completed")

    def p2p(self, source: int, target: int, *, group: str = "0", sides: str = "both", state: str = "completed") -> None:
        """A send and its receive, or one side of it; ranks are numbers within the group."""
        self.now_ns += MS
        members = self.groups[group][1]
        if sides in ("both", "send"):
            self._p2p(members[source], group, f"send {source}->{target}", state)
        if sides in ("both", "recv"):
            self._p2p(members[target], group, f"recv {target}<-{source}", state)

    def coalesced(self, ops: dict[int, list[str]], *, group: str = "0", state: str = "started") -> None:
        """A batch of p2p calls per rank: only the entry `coalesced` after them has events."""
        self.now_ns += MS
        for rank, names in ops.items():
            number = self._next(rank, group, "p2p")
            for name in [*names, "coalesced"]:
                entry_state = state if name == "coalesced" else "scheduled"
                before = self.seq.get((rank, group, "collective"), 0)
                self._record(rank, group, name, entry_state, collective=before, p2p=number,
                             sizes=[[8]] if name != "coalesced" else [], dtypes=["Float"], is_p2p=True,
                             retired=entry_state == "completed")  # fmt: skip

    def dump(self, rank: int) -> dict[str, Any]:
        """One rank's dump, as unpickled."""
        groups_of_rank = [name for name, (_, members) in self.groups.items() if rank in members]
        return {
            "version": self.version,
            "comm_lib_version": "2.27.3",
            "pg_config": {
                name: {"name": name, "desc": self.groups[name][0], "ranks": str(self.groups[name][1])}
                for name in groups_of_rank
            },
            "pg_status": {
                str(i): {
                    "last_enqueued_collective": self.seq.get((rank, name, "collective"), 0),
                    "last_started_collective": self.seq.get((rank, name, "collective"), 0),
                    "last_completed_collective": 0,
                }
                for i, name in enumerate(groups_of_rank)
            },
            "entries": self.entries[rank][-self.ring :],
        }

    def write(
        self, folder: Path, *, ranks: Sequence[int] | None = None, after_s: float = 600.0, as_json: bool = False
    ) -> Path:
        """Write the dumps; the files' times are `after_s` after the newest record."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.num_ranks) if ranks is None else ranks:
            path = folder / (f"{PREFIX}{rank}.json" if as_json else f"{PREFIX}{rank}")
            if as_json:
                path.write_text(json.dumps(self._as_json(rank)))
            else:
                path.write_bytes(pickle.dumps(self.dump(rank), protocol=2))
            written_ns = self.now_ns + int(after_s * 10**9)
            os.utime(path, ns=(written_ns, written_ns))
        return folder

    def _as_json(self, rank: int) -> dict[str, Any]:
        dump = self.dump(rank)
        dump["pg_status"] = {k: {n: str(v) for n, v in status.items()} for k, status in dump["pg_status"].items()}
        times = [f"time_discovered_{what}_ns" for what in ("started", "completed")]
        dump["entries"] = [
            {k: v for k, v in entry.items() if k != "frames"} | {name: entry[name] or 0 for name in times}
            for entry in dump["entries"]
        ]
        return dump

    def _next(self, rank: int, group: str, kind: str) -> int:
        self.seq[rank, group, kind] = self.seq.get((rank, group, kind), 0) + 1
        return self.seq[rank, group, kind]

    def _p2p(self, rank: int, group: str, name: str, state: str) -> None:
        number = self._next(rank, group, "p2p")
        self._record(rank, group, name, state, collective=self.seq.get((rank, group, "collective"), 0), p2p=number,
                     sizes=[[64]], dtypes=["BFloat16"], is_p2p=True, retired=state == "completed")  # fmt: skip

    def _record(
        self, rank: int, group: str, op: str, state: str, *, collective: int, p2p: int,
        sizes: list[list[int]], dtypes: list[str], retired: bool, is_p2p: bool = False,
    ) -> None:  # fmt: skip
        began = state in ("started", "completed")
        entry = {
            "frames": FRAMES,
            "record_id": self.num_recorded[rank],
            "pg_id": list(self.groups).index(group),
            "process_group": (group, self.groups[group][0]),
            "thread_name": "pt_main_thread",
            "thread_id": "140077594069888",
            "collective_seq_id": collective,
            "p2p_seq_id": p2p,
            "op_id": collective + p2p,
            "profiling_name": f"{self.backend}:{op}",
            "time_created_ns": self.now_ns,
            "input_sizes": sizes,
            "input_dtypes": dtypes[: len(sizes)],
            "output_sizes": sizes,
            "output_dtypes": dtypes[: len(sizes)],
            "state": state,
            "time_discovered_started_ns": self.now_ns + 1000 if began else None,
            "time_discovered_completed_ns": self.now_ns + 2000 if state == "completed" else None,
            "retired": retired,
            "timeout_ms": TIMEOUT_MS,
            "is_p2p": is_p2p,
        }
        if state == "completed":
            entry["duration_ms"] = 0.25
        self.num_recorded[rank] += 1
        self.entries[rank].append(entry)
