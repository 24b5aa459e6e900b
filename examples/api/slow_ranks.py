"""List the ranks of a run by their compute time, with the time that they wait for others; needs only numpy.

python slow_ranks.py runs/latest
"""

from __future__ import annotations

import sys

import numpy as np

import rankscope


def table(path: str) -> list[tuple[int, float, float]]:
    """(rank, median milliseconds in forward and backward, median milliseconds waiting), the slowest first."""
    account = rankscope.open_run(path).account()
    work = (account.of("forward") + account.of("backward")) / 1e6
    waiting = account.of("waiting") / 1e6
    rows = [
        (int(rank), float(np.nanmedian(work[i])), float(np.nanmedian(waiting[i])))
        for i, rank in enumerate(account.ranks)
    ]
    return sorted(rows, key=lambda row: -row[1])


if __name__ == "__main__":
    for rank, work_ms, waiting_ms in table(sys.argv[1]):
        print(f"rank {rank}: {work_ms:.2f} ms of work, {waiting_ms:.2f} ms of waiting")
