"""The figures that prove a finding.

    for drawing in drawings(store, finding):
        drawing.title, drawing.figure           # "Own work of rank 3 beside the others", a Plotly figure

The HTML report and the dashboard show the same ones. `PROOFS` says which kind has which; the functions themselves are
in `proofs`. A figure whose data is missing is left out, and what has no proof in the store has none: the loss is drawn
for what is said of the loss only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from analyzers.figures import queries, timeline
from analyzers.figures import wait_for as waitfor
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.hangs.wait_for import find_culprits
from analyzers.report.proofs import devices, nodes, numerics, ranks, spent
from analyzers.run.event_log import EventLog
from analyzers.run.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.source import Source

__all__ = ["PROOFS", "UNDRAWN", "Drawing", "drawings", "moment"]

MAX_RANKS = 16
AT_END = ("hang", "rank_lost", "excluded")
"""Kinds that are told of the end of an attempt: its last steps, whatever step the finding names."""
Proof = Callable[[Source, Finding], Iterator[Drawing]]


def drawings(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Figures for one finding, the most telling first."""
    for proof in PROOFS.get(finding.kind, ()):
        yield from proof(source, finding)


def moment(source: Source, finding: Finding | None = None) -> Iterator[Drawing]:
    """The timeline around a finding's first step, or at the end of the run."""
    if not source.has("steps"):
        return
    attempt = finding.attempt if finding is not None else None
    if attempt is None:
        ((attempt,),) = source.rows("SELECT max(attempt) FROM steps")
    if attempt is None:
        return
    ((newest,),) = source.rows("SELECT max(step) FROM steps WHERE attempt = ? AND rank >= 0", [attempt])
    at_end = finding is None or finding.first_step is None or finding.kind in AT_END
    last = newest if at_end or finding is None or finding.first_step is None else finding.first_step + 1
    if last is None:
        return
    first = max(0, last - (1 if at_end else 2))
    shown = _beside(source, attempt, finding.ranks if finding is not None else ())
    pieces = queries.timeline(source, attempt=attempt, first_step=first, last_step=last, ranks=shown)
    if pieces:
        title = (
            f"What {'the ranks' if len(shown) < MAX_RANKS else f'{len(shown)} ranks'} did in steps {first} to {last}"
        )
        yield Drawing(title=title, figure=timeline.draw(pieces, ranks=shown))


def _straggler(source: Source, finding: Finding) -> Iterator[Drawing]:
    """Own work beside the others'; of a slow link its transfers, and what the ranks did."""
    if finding.cause == "communication":
        yield from ranks.link(source, finding)
        yield from moment(source, finding)
    else:
        yield from ranks.work(source, finding)


def _rank_lost(source: Source, finding: Finding) -> Iterator[Drawing]:
    """What the ranks did at the end; of one that ran out of memory, its memory first."""
    if finding.cause == "out_of_memory":
        yield from ranks.memory(source, finding)
    yield from moment(source, finding)


def _wait_for(source: Source, finding: Finding) -> Iterator[Drawing]:
    if finding.attempt is None:
        return
    view = take_snapshot(source, finding.attempt, EventLog.load(source, SNAPSHOT_EVENTS))
    if view.ranks:
        yield Drawing(title="Who waits for whom", figure=waitfor.draw(view, find_culprits(view)))


def _memory_limit(source: Source, finding: Finding) -> Iterator[Drawing]:
    """What is in use of all there is; then which of its ranks holds how much."""
    yield from devices.memory_full(source, finding)
    yield from ranks.memory(source, finding)


def _configuration(source: Source, finding: Finding) -> Iterator[Drawing]:
    """By the setting that the advice is about."""
    for proof in _OF_SETTING.get(finding.cause, ()):
        yield from proof(source, finding)


_OF_SETTING: Mapping[str, Sequence[Proof]] = {
    "buckets": (spent.buckets,),
    "microbatches": (spent.stages,),
    "tensor_parallel": (spent.communication,),
    "compression": (numerics.compression,),
    "checkpoint_interval": (spent.saved, spent.waterfall),
    "workers": (spent.data,),
    "evaluation": (spent.waterfall,),
}
PROOFS: Mapping[str, Sequence[Proof]] = {
    "straggler": (_straggler,),
    "hang": (_wait_for, moment),
    "rank_lost": (_rank_lost,),
    "excluded": (moment,),
    "node_silent": (nodes.progress,),
    "non_finite": (numerics.nonfinite,),
    "loss_spike": (numerics.loss_around,),
    "divergence": (numerics.loss_around,),
    "loss_scale_collapse": (numerics.scale,),
    "vanishing_gradients": (numerics.flow,),
    "exploding_gradients": (numerics.flow,),
    "gradient_noise": (numerics.noise,),
    "gradient_corrupted": (ranks.corrupted_gradient,),
    "replica_mismatch": (numerics.replicas,),
    "fingerprint_chain_broken": (numerics.replicas,),
    "resume_differs": (numerics.resume,),
    "expert_imbalance": (numerics.experts,),
    "memory_growth": (ranks.memory,),
    "memory_imbalance": (ranks.memory,),
    "memory_limit": (_memory_limit,),
    "xid": (devices.xid,),
    "gpu_memory_errors": (devices.memory_errors,),
    "gpu_throttled": (devices.throttled,),
    "link_errors": (devices.link_errors,),
    "host_pressure": (devices.pressure,),
    "bubble": (spent.stages,),
    "stage_imbalance": (spent.stages,),
    "exposed_communication": (spent.communication,),
    "low_bandwidth": (spent.bandwidth,),
    "small_buckets": (spent.buckets,),
    "throughput": (spent.shared,),
    "data_bound": (spent.data,),
    "checkpoint_failed": (spent.saved,),
    "checkpoint_age": (spent.old_save,),
    "checkpoint_cost": (spent.saved, spent.waterfall),
    "slow_startup": (ranks.startup,),
    "configuration": (_configuration,),
}
"""Kind -> its proofs, the most telling first."""
UNDRAWN = ("goodput", "records", "health")
"""Kinds that only ever say that something was not judged: there is nothing to draw."""


def _beside(source: Source, attempt: int, named: Sequence[int]) -> list[int]:
    """Ranks to show: those named, and others up to `MAX_RANKS`."""
    rows = source.rows("SELECT DISTINCT rank FROM steps WHERE attempt = ? AND rank >= 0 ORDER BY rank", [attempt])
    everybody = [int(rank) for (rank,) in rows]
    chosen = [rank for rank in named if rank in set(everybody)][:MAX_RANKS]
    chosen += [rank for rank in everybody if rank not in set(chosen)][: MAX_RANKS - len(chosen)]
    return sorted(chosen)
