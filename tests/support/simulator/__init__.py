"""A simulator of distributed training: what many ranks would have recorded, without the ranks.

    from tests.support.simulator import Fault, Layout, Scenario, simulate, write

    fault = Fault(kind="hang", step=40, rank=5)
    recording = simulate(Scenario(seed=1, layout=Layout(dp_shard=16), steps=80, fault=fault))
    run = write(recording, Path("runs/simulated"))

It simulates what ranks do (work, arrival at collectives, waiting for the last member, transfers) and writes that in
the formats of real runs. It is independent of the analyzers: it was written from the list of faults.

    noise      how much real ranks vary, and how to fit that to a recorded run
    layout     mesh, groups, labels
    program    the operations of a step, for each layout
    engine     computes their times
    transfers  durations of collectives and messages
    taints     where a NaN spreads
    faults     faults and their effects
    curves     loss, gradient norm, learning rate
    scenario   one run from a seed
    aftermath  records of a run's end
    records    the tables' columns
    tapes      the files
    on_devices what ranks on GPUs record
    scale      runs of thousands of ranks, in closed form
    schedules  pipelines with a known idle share
"""

from __future__ import annotations

from .faults import Fault
from .layout import Layout
from .noise import OVERSUBSCRIBED, QUIET, SHARED_HOST, Noise, fit_noise
from .program import Job
from .recording import Clock, Recording, Scenario
from .scenario import simulate
from .tapes import write

__all__ = [
    "OVERSUBSCRIBED",
    "QUIET",
    "SHARED_HOST",
    "Clock",
    "Fault",
    "Job",
    "Layout",
    "Noise",
    "Recording",
    "Scenario",
    "fit_noise",
    "simulate",
    "write",
]
