"""Spans of a pipeline: forward, backward and weight gradient of each microbatch on each stage.

    for stage in pipeline.stages:                     # stages of torch.distributed.pipelining
        record_stage(recorder, stage)

The schedule calls these methods of its stages one after the other; what lies between the spans is sending, receiving
and waiting, of which the collectives' records tell the rest.
"""

from __future__ import annotations

from typing import Any

from .failopen import failing_open
from .recorder import Recorder

__all__ = ["record_stage"]

_METHODS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight",
}


def record_stage(recorder: Recorder, stage: Any) -> None:
    """Record what `stage`, one of this rank's, computes from now on."""
    if not recorder.enabled:
        return
    with failing_open("pipeline"):
        for method, kind in _METHODS.items():
            setattr(stage, method, _spanned(recorder, getattr(stage, method), kind, int(stage.stage_index)))


def _spanned(recorder: Recorder, real: Any, kind: str, stage: int) -> Any:
    def spanned(*args: Any, **kwargs: Any) -> Any:
        chunk = args[0] if args else next(iter(kwargs.values()))  # the first parameter, under three names
        with recorder.span(kind, microbatch=chunk, stage=stage):
            return real(*args, **kwargs)

    return spanned
