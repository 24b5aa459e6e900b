"""What it costs a step to measure its processor time."""

from __future__ import annotations

import time

from probes.device.cpu_time import CoreTime


def test_a_step_costs_microseconds() -> None:
    measured, steps = CoreTime(), 300
    best = float("inf")
    for _ in range(5):
        before = time.thread_time()
        for _ in range(steps):
            measured.begin()
            measured.end()
        best = min(best, (time.thread_time() - before) / steps)
    assert best < 100e-6  # some 10 us
