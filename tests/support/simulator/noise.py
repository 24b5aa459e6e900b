"""Variation of real ranks: every noise and jitter parameter of the simulator, in one place.

    noise = Noise()                    # a quiet GPU cluster
    noise = SHARED_HOST                # several ranks on the cores of one machine, over gloo
    noise = OVERSUBSCRIBED             # the same with fewer cores than ranks: measured
    noise = fit_noise(store)           # what a recorded run shows

Ratios are relative standard deviations unless the name says otherwise. Figures that were not
measured are marked as assumed; `fit_noise` replaces those that a recorded run shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["OVERSUBSCRIBED", "QUIET", "SHARED_HOST", "Noise", "fit_noise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """See the module's docstring."""

    compute_ratio: float = 0.012
    """One piece of compute against the next on the same rank (assumed: kernels of fixed shape on a GPU)."""
    rank_ratio: float = 0.003
    """Lasting difference of healthy ranks (assumed: one model of GPU, one power limit, clocks locked)."""
    step_ratio: float = 0.01
    """What all ranks of a step share: content, temperature (assumed)."""
    preemptions_per_s: float = 0.05
    """How often the operating system takes a rank's thread away (assumed: one housekeeping tick in 20 s)."""
    preemption_s: float = 0.004
    """Mean length of that, exponentially distributed (assumed: one or two scheduler slices)."""
    gc_interval_steps: float = 120.0
    """Steps between full runs of Python's garbage collector, at each rank's own time (assumed)."""
    gc_pause_s: float = 0.015
    """Length of one (order of magnitude measured on a trainer process with torch imported)."""
    data_ratio: float = 0.25
    """Time to hand over a prefetched batch, lognormal (assumed)."""
    data_miss_probability: float = 0.004
    """Share of batches that were not prefetched in time (assumed)."""
    data_miss_factor: float = 10.0
    """How much longer such a batch takes (assumed)."""
    transfer_ratio: float = 0.04
    """One transfer against the next of the same size, lognormal (assumed)."""
    transfer_tail_probability: float = 0.002
    """Share of transfers that hit congestion (assumed)."""
    transfer_tail_factor: float = 5.0
    """How much longer those take (assumed)."""
    exit_s: float = 6e-6
    """Spread of the members' return from one collective (assumed: a wake-up)."""
    call_s: float = 8e-6
    """Host time to issue a collective."""
    compile_s: float = 3.0
    """Extra time of the first step: compilation, autotuning, allocator growth (assumed)."""
    communicator_s: float = 0.4
    """Extra time of the first call of a process group: its communicator is made (assumed)."""
    loss_ratio: float = 0.02
    """Batch noise of the global loss (assumed; falls with the batch size)."""
    local_loss_ratio: float = 0.03
    """Spread of the ranks' local losses around the global one (assumed)."""
    grad_norm_ratio: float = 0.12
    """Noise of the gradient norm, lognormal (assumed)."""


QUIET = Noise()
SHARED_HOST = replace(
    QUIET,
    compute_ratio=0.04,
    rank_ratio=0.006,
    step_ratio=0.02,
    preemptions_per_s=1.0,
    preemption_s=0.003,
    transfer_ratio=0.15,
    exit_s=40e-6,
    call_s=30e-6,
    compile_s=0.6,
    communicator_s=0.05,
)

OVERSUBSCRIBED = replace(
    SHARED_HOST,
    compute_ratio=0.17,
    rank_ratio=0.0095,
    step_ratio=0.27,
    data_ratio=0.22,
    data_miss_probability=0.07,
    loss_ratio=0.05,
    local_loss_ratio=0.07,
    grad_norm_ratio=0.19,
)
"""Measured with `fit_noise` on two real runs of the trainer: four ranks of the demo, and two of a smaller model, over
gloo on two cores that were busy with other work as well."""


class Readable(Protocol):
    """Part of `store.Store` that is used here."""

    def query(self, sql: str) -> dict[str, npt.NDArray[np.float64]]: ...


def fit_noise(store: Readable, start: Noise = QUIET, *, skip_steps: int = 5) -> Noise:
    """The noise of a recorded, healthy run; what it does not show is taken from `start`.

    1. Own compute of a rank in a step = forward + backward, without the time blocked in collectives.
    2. log(own) = step's median + rank's median + residual: the deviations of the three are `step_ratio`, `rank_ratio`
       and `compute_ratio` (robust: 1.4826 x the median absolute deviation, so that pauses do not count).
    3. Residuals above 5 deviations are preemptions: their rate per second and mean length.
    4. Data: the deviation of log(data), and the share above 5 times the median.
    """
    table = store.query(
        "SELECT rank, step, (forward_ns + backward_ns - coalesce(forward_wait_ns, 0) - coalesce(backward_wait_ns, 0))"
        " / 1e9 AS own_s, data_ns / 1e9 AS data_s, duration_ns / 1e9 AS duration_s, loss, local_loss, grad_norm"
        f" FROM steps WHERE duration_ns IS NOT NULL AND step > {skip_steps} ORDER BY step, rank"
    )
    own = _grid(table, "own_s")
    if min(own.shape, default=0) < 2:
        return start
    logs = np.log(np.maximum(own, 1e-9))
    by_step = np.median(logs, axis=1, keepdims=True)
    by_rank = np.median(logs - by_step, axis=0, keepdims=True)
    residual = logs - by_step - by_rank
    compute = _robust(residual)
    preempted = residual > 5.0 * max(compute, 1e-4)
    preempted_s = (own * (1.0 - np.exp(-residual)))[preempted]
    data = np.log(np.maximum(_grid(table, "data_s"), 1e-9))
    data_residual = data - np.median(data)
    change = np.diff(np.log(np.maximum(_grid(table, "loss")[:, 0], 1e-9)))
    spread = np.log(np.maximum(_grid(table, "local_loss"), 1e-9)) - np.log(np.maximum(_grid(table, "loss"), 1e-9))
    norm_change = np.diff(np.log(np.maximum(_grid(table, "grad_norm")[:, 0], 1e-9)))
    found = {
        "compute_ratio": compute,
        "rank_ratio": float(np.std(by_rank)),
        "step_ratio": _robust(np.diff(by_step[:, 0])) / np.sqrt(2.0),
        "preemptions_per_s": float(preempted.sum() / max(np.nansum(_grid(table, "duration_s")), 1e-9)),
        "preemption_s": float(preempted_s.mean()) if len(preempted_s) else start.preemption_s,
        "data_ratio": _robust(data_residual),
        "data_miss_probability": float(np.mean(data_residual > np.log(5.0))),
        "loss_ratio": _robust(change) / np.sqrt(2.0),
        "local_loss_ratio": _robust(spread),
        "grad_norm_ratio": _robust(norm_change) / np.sqrt(2.0),
    }
    return replace(start, **{name: float(value) for name, value in found.items() if np.isfinite(value)})


def _grid(table: dict[str, npt.NDArray[np.float64]], column: str) -> npt.NDArray[np.float64]:
    """A column as (steps, ranks); steps that a rank lacks or ran twice are left out."""
    steps, ranks = np.asarray(table["step"]), np.asarray(table["rank"])
    values = np.asarray(table[column], dtype=np.float64)
    num_ranks = len(np.unique(ranks))
    found, counts = np.unique(steps, return_counts=True)
    whole = np.isin(steps, found[counts == num_ranks])
    return values[whole].reshape(-1, max(num_ranks, 1))


def _robust(values: npt.NDArray[np.float64]) -> float:
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan")
    return float(1.4826 * np.median(np.abs(values - np.median(values))))
