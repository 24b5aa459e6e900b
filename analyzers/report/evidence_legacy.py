"""Figures of kinds whose package has no `figures` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from analyzers.figures import wait_for as waitfor
from analyzers.figures.moment import moment
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.hangs.wait_for import find_culprits
from analyzers.report.proofs import devices, nodes, numerics, ranks, spent
from analyzers.run.event_log import EventLog
from analyzers.run.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.source import Source

__all__ = ["PROOFS"]

Proof = Callable[[Source, Finding], Iterator[Drawing]]


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
    "resume_differs": (numerics.resume,),
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
