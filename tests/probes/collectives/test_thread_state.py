"""gloo's threads keep their Python state from one call of Python to the next, if the call asks for it."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from probes.collectives.thread_state import keep_thread_state
from tests.waiting import wait_for

CALLS = 20
NUMBERS = 1 << 20  # long enough that a call is still running when its callback is added


def lives_and_threads(*, keep: bool) -> tuple[int, int]:
    """How many states gloo's threads had in `CALLS` calls, and how many threads there were."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    of_the_state = threading.local()
    lives: list[int] = []
    threads: list[int] = []
    main = threading.get_ident()

    def completed(done: object) -> None:
        if threading.get_ident() == main:
            return  # it was complete already
        if keep:
            keep_thread_state()
        if not hasattr(of_the_state, "seen"):
            of_the_state.seen = True
            lives.append(1)
        threads.append(threading.get_ident())

    def call() -> bool:
        work = group.allreduce([torch.ones(NUMBERS)])
        work.get_future().add_done_callback(completed)
        work.wait()
        return len(threads) >= CALLS

    wait_for(call, f"{CALLS} calls back on threads of gloo")
    return len(lives), len(set(threads))


def test_a_thread_that_keeps_its_state_has_one() -> None:
    lives, threads = lives_and_threads(keep=True)
    assert lives == threads


def test_without_it_every_call_has_a_new_one() -> None:
    lives, _ = lives_and_threads(keep=False)
    assert lives >= CALLS // 2, "torch keeps the state by itself: `keep_thread_state` is not needed any more"
