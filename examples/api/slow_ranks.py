"""The ranks of a run by the time that they compute and that others make them wait, with numpy alone.

python slow_ranks.py runs/latest
"""

from __future__ import annotations

import sys

import numpy as np

import rankscope


def table(path: str) -> list[tuple[int, float, float]]:
    """(rank, median milliseconds of forward and backward, of waiting), the slowest first."""
    account = rankscope.open_run(path).account()
    work = (account.of("forward") + account.of("backward")) / 1e6
    waiting = account.of("waiting") / 1e6
    rows = [
        (int(rank), float(np.nanmedian(work[place])), float(np.nanmedian(waiting[place])))
        for place, rank in enumerate(account.ranks)
    ]
    return sorted(rows, key=lambda row: -row[1])


if __name__ == "__main__":
    for rank, work_ms, waiting_ms in table(sys.argv[1]):
        print(f"rank {rank}: {work_ms:.2f} ms of work, {waiting_ms:.2f} ms of waiting")
