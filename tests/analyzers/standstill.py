"""Synthetic ends of runs: ranks that step together until something happens to one of them.

world = World(ranks=4, steps=15)
world.enter(0, "dp[0,1,2,3]", 57)          # in flight from now on
world.store                                # what the analyzers read
"""

from __future__ import annotations

from typing import Any

from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
SECOND = 1_000_000_000
STEP_NS = 50 * MS
START_NS = 1_700_000_000 * SECOND


class World:
    """All ranks of one attempt, with `steps` finished steps of two collectives each and one step begun.

    `program` says which: (op, caller) of both.
    """

    def __init__(
        self,
        ranks: int = 4,
        steps: int = 15,
        *,
        attempt: int = 0,
        first_step: int = 1,
        groups: dict[str, tuple[int, ...]] | None = None,
        store: MemoryStore | None = None,
        start_ns: int = START_NS,
        clock_offset_ns: dict[int, int] | None = None,
        program: tuple[tuple[str, str], ...] = (("all_reduce", "train.py:10 step"),) * 2,
    ) -> None:
        self.store = store or MemoryStore()
        self.attempt = attempt
        self.ranks = range(ranks)
        self.groups = groups or {f"dp{list(self.ranks)}": tuple(self.ranks)}
        self.offset = clock_offset_ns or {}
        self.step = first_step + steps
        self.now_ns = start_ns + steps * STEP_NS + 10 * MS
        self.next_seq = 2 * steps
        identity: list[dict[str, Any]] = []
        members, rows, calls = [], [], []
        for rank in self.ranks:
            skew = self.offset.get(rank, 0)
            identity.append(
                {"attempt": attempt, "rank": rank, "wall_ns": start_ns + skew, "world_size": ranks, "pp": 0}
            )
            for i in range(steps):
                begin = start_ns + i * STEP_NS + skew
                rows.append(self._of(rank, step=first_step + i, start_ns=begin, duration_ns=STEP_NS - MS))
                for group, ranks_of in self.groups.items():
                    if rank in ranks_of:
                        calls += [self._call(rank, group, 2 * i + k, begin + k * MS, begin + 2 * k * MS + MS,
                                             step=first_step + i) | {"op": op, "caller": caller}
                                  for k, (op, caller) in enumerate(program)]  # fmt: skip
            rows.append(self._of(rank, step=self.step, start_ns=start_ns + steps * STEP_NS + skew, duration_ns=None))
            for group, ranks_of in self.groups.items():
                members.append(self._of(rank, process_group=group, members=list(ranks_of)))
        self.store.add("ranks", identity)
        self.store.add("process_groups", members)
        self.store.add("steps", rows)
        self.store.add("collectives", calls)

    def enter(self, rank: int, group: str = "", seq: int | None = None, **columns: Any) -> None:
        """Rank enters the next collective of a group (the first one by default) and stays in it."""
        group = group or next(iter(self.groups))
        at_ns = self.now_ns + self.offset.get(rank, 0)
        call = self._call(rank, group, self.next_seq if seq is None else seq, at_ns, None, step=self.step)
        self.store.add("collectives", [call | columns])

    def span(self, rank: int, kind: str, end_ns: int | None = None) -> None:
        """Rank opens a span (and leaves it at `end_ns`)."""
        start_ns = self.now_ns + self.offset.get(rank, 0)
        self.store.add("spans", [self._of(rank, step=self.step, kind=kind, start_ns=start_ns, end_ns=end_ns)])

    def event(self, kind: str, after_s: float, rank: int = -1, **detail: Any) -> None:
        """An event so many seconds after the last record."""
        self.store.event(kind, attempt=self.attempt, rank=rank, wall_ns=self.after(after_s), step=self.step, **detail)

    def after(self, seconds: float) -> int:
        """The time so many seconds after the last record."""
        return self.now_ns + int(seconds * SECOND)

    def _of(self, rank: int, **columns: Any) -> dict[str, Any]:
        return {"attempt": self.attempt, "rank": rank, **columns}

    def _call(self, rank: int, group: str, seq: int, issue_ns: int, end_ns: int | None, step: int) -> dict[str, Any]:
        return self._of(
            rank, step=step, seq=seq, bytes=4096, issue_ns=issue_ns, end_ns=end_ns, process_group=group,
            op="all_reduce", dtype="float32", shape="1024", caller="train.py:10 step", peer=None, is_async=False,
        )  # fmt: skip
