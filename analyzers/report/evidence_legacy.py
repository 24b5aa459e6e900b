"""Figures of kinds whose package has no `figures` yet; deleted entry by entry as they move there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from analyzers.checkpoints import figures as checkpoints
from analyzers.communication import figures as communication
from analyzers.data import figures as data
from analyzers.figures.titled_figure import Drawing
from analyzers.finding import Finding
from analyzers.pipeline import figures as pipeline
from analyzers.report.proofs import numerics, ranks
from analyzers.source import Source

__all__ = ["PROOFS"]

Proof = Callable[[Source, Finding], Iterator[Drawing]]


def _configuration(source: Source, finding: Finding) -> Iterator[Drawing]:
    """By the setting that the advice is about."""
    for proof in _OF_SETTING.get(finding.cause, ()):
        yield from proof(source, finding)


_OF_SETTING: Mapping[str, Sequence[Proof]] = {
    "buckets": (communication.buckets,),
    "microbatches": (pipeline.stages,),
    "tensor_parallel": (communication.exposure,),
    "compression": (numerics.compression,),
    "checkpoint_interval": (checkpoints.saved, checkpoints.waterfall),
    "workers": (data.waits,),
    "evaluation": (checkpoints.waterfall,),
}
PROOFS: Mapping[str, Sequence[Proof]] = {
    "slow_startup": (ranks.startup,),
    "configuration": (_configuration,),
}
"""Kind -> its proofs, the most telling first."""
