"""Figures of kinds whose package has no `figures` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from analyzers.figures.moment import moment
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.report.proofs import numerics, ranks, spent
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
