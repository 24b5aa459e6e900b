"""Synthetic step times: ranks compute, wait for the slowest, and leave together, on a quiet or a crowded machine.

timings = simulate(seed=1, ranks=4, steps=120, machine="crowded", faults=[Slow(rank=3, step=60, factor=1.5)])

It simulates what ranks do. Nothing here knows what an analyzer looks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analyzers.account.timings import OWN_PHASES, Timings

Array = npt.NDArray[np.float64]
PHASE_MS = {"data": 1.0, "forward": 14.0, "backward": 28.0, "optimizer": 4.0}
TRANSFER_MS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A fault: `rank` takes `factor` times as long from `step` on (to `until`), in compute or in data; or stops for
    `pause_ms` in a part `share` of the steps, wherever it is."""

    rank: int
    step: int
    factor: float = 1.5
    until: int = 10**9
    cause: str = "compute"
    pause_ms: float = 0.0
    share: float = 0.0


def noise(rng: np.random.Generator, machine: str, shape: tuple[int, int]) -> Array:
    """Factors on a phase's time. quiet: a GPU; busy: a CPU node; crowded: four ranks and others on two cores."""
    if machine == "quiet":
        return np.exp(0.005 * rng.standard_normal(shape))
    ranks, steps = shape
    sigma = 0.04 if machine == "busy" else 0.12
    factors = np.exp(sigma * rng.standard_t(4, shape))
    # Preemption: now and then a rank loses a slice or several.
    factors += (rng.random(shape) < (0.02 if machine == "busy" else 0.1)) * rng.exponential(0.5, shape)
    if machine == "crowded":
        # A neighbour's job lives on one core for a while and slows whoever runs there; the scheduler moves them about.
        for _ in range(rng.poisson(steps / 40)):
            begin, length = rng.integers(steps), rng.integers(3, 15)
            weight = rng.dirichlet(np.ones(ranks)) * rng.uniform(0.2, 1.5)
            factors[:, begin : begin + length] += weight[:, None]
        # Ranks differ a little for good: placement of memory, the launcher's core.
        factors *= np.exp(0.01 * rng.standard_normal((ranks, 1)))
    return factors


def simulate(
    seed: int,
    *,
    ranks: int = 4,
    steps: int = 120,
    machine: str = "quiet",
    faults: Sequence[Slow] = (),
    stages: int = 1,
    steps_run: Sequence[int] | None = None,
) -> Timings:
    """Timings of one attempt; with `stages` the ranks of a later stage have more work."""
    rng = np.random.default_rng(seed)
    numbers = np.array(steps_run if steps_run is not None else range(1, steps + 1))
    shape = (ranks, len(numbers))
    stage = np.arange(ranks) % stages
    own = {}
    for phase in OWN_PHASES:
        values = PHASE_MS[phase] * noise(rng, machine, shape) * (1 + 0.5 * stage[:, None])
        if phase == "forward":  # a full garbage collection, each rank at its own time
            values += (rng.random(shape) < 0.01) * rng.uniform(20, 60, shape)
        for fault in faults:
            hit = (numbers >= fault.step) & (numbers <= fault.until)
            if fault.share:
                continue
            if fault.cause == "compute" and phase in ("forward", "backward"):
                values[fault.rank, hit] *= fault.factor
            if fault.cause == "data" and phase == "data":
                values[fault.rank, hit] += (fault.factor - 1) * sum(PHASE_MS.values())
        own[phase] = values
    for fault in faults:
        stops = (numbers >= fault.step) & (numbers <= fault.until) & (rng.random(len(numbers)) < fault.share)
        where = rng.choice(list(OWN_PHASES), size=len(numbers))
        for phase in OWN_PHASES:
            own[phase][fault.rank] += stops * (where == phase) * fault.pause_ms
    work = sum(own.values())
    slowest = work.max(axis=0)
    wait = slowest - work + TRANSFER_MS * noise(rng, machine, (1, len(numbers)))
    return Timings(
        attempt=0,
        ranks=np.arange(ranks),
        steps=numbers,
        own={phase: values.astype(np.float32) for phase, values in own.items()},
        wait=wait.astype(np.float32),
        duration=(work + wait).astype(np.float32),
        peers=tuple(np.flatnonzero(stage == value) for value in range(stages)),
    )
