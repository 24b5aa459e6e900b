"""Record spans of a pipeline: what each stage computes, sends and receives, by microbatch.

    record_schedule(recorder, schedule, stages)       # a schedule and the rank's stages of torch.distributed.pipelining

| kind | start and end | adds to the step's |
|---|---|---|
| `forward` | `forward_one_chunk` | forward |
| `loss` | the loss of one microbatch, on the last stage | forward |
| `backward` | `backward_one_chunk`: of inputs and weights, or of inputs alone under a zero-bubble schedule | backward |
| `weight` | `backward_weight_one_chunk` | backward |
| `reduce` | `perform_reduce_grad`: what FSDP reduces after the last microbatch (nothing without FSDP) | backward |
| `send`, `recv` | posted, and waited for; `wait_ns` is how long the wait blocked | |

For one stage and microbatch the first `recv` is of activations and the second of gradients. The first stage receives
only gradients, the last only activations. Between two stages on the same rank nothing is sent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .fail_open import failing_open, record_error
from .recorder import Recorder
from .tape.format.schema import UNSET
from .tape.format.writer import OPEN
from .tape_recorder import TapeRecorder

__all__ = ["record_schedule", "record_stage"]

_COMPUTATIONS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight",
}
_TRANSFERS = {
    "get_fwd_recv_ops": "recv",
    "get_bwd_recv_ops": "recv",
    "get_fwd_send_ops": "send",
    "get_bwd_send_ops": "send",
}
_SCHEDULES = "torch.distributed.pipelining.schedules"
_NONE_I64 = int(UNSET["i64"])
_monotonic_ns = time.monotonic_ns


def record_schedule(recorder: Recorder, schedule: Any, stages: Iterable[Any]) -> None:
    """Record the work of `stages` (all stages of this rank) under `schedule` from now on."""
    if not recorder.enabled:
        return
    for stage in stages:
        record_stage(recorder, stage)
    with failing_open("pipeline"):
        real = schedule._maybe_compute_loss

        def spanned(stage: Any, output: Any, target_mbs: Any, mb_index: int, *args: Any, **kwargs: Any) -> Any:
            if not stage.is_last:
                return real(stage, output, target_mbs, mb_index, *args, **kwargs)
            with recorder.span("loss", microbatch=mb_index, stage=stage.stage_index):
                return real(stage, output, target_mbs, mb_index, *args, **kwargs)

        schedule._maybe_compute_loss = spanned


def record_stage(recorder: Recorder, stage: Any) -> None:
    """From now on, record the work of `stage`, one of this rank's stages. To record the stage's loss, call
    `record_schedule`."""
    if not isinstance(recorder, TapeRecorder):
        return
    with failing_open("pipeline"):
        number = int(stage.stage_index)
        for method, kind in _COMPUTATIONS.items():
            setattr(stage, method, _spanned(recorder, getattr(stage, method), kind, number))
        if hasattr(stage, "perform_reduce_grad"):
            stage.perform_reduce_grad = _spanned_reduction(recorder, stage.perform_reduce_grad, number)
        if _follow_transfers():
            spans = _Spans(recorder)
            for method, kind in _TRANSFERS.items():
                setattr(stage, method, _marked(spans, getattr(stage, method), kind, number))


def _spanned(recorder: Recorder, real: Any, kind: str, stage: int) -> Any:
    def spanned(*args: Any, **kwargs: Any) -> Any:
        # The chunk is the first parameter of all three functions, under different names.
        chunk = args[0] if args else next(iter(kwargs.values()))
        with recorder.span(kind, microbatch=chunk, stage=stage):
            return real(*args, **kwargs)

    return spanned


def _spanned_reduction(recorder: Recorder, real: Any, stage: int) -> Any:
    def spanned(*args: Any, **kwargs: Any) -> Any:
        with recorder.span("reduce", stage=stage):
            return real(*args, **kwargs)

    return spanned


# Transfers. A stage names the transfers that it needs. Its schedule posts them, and later waits for several at once.


class _Spans:
    """Writes spans that do not nest: other spans start and end while a transfer is in flight."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self._append = recorder.tape("spans").append
        self._finish = recorder.tape("spans").finisher("end_ns", "wait_ns")

    def open(self, kind: str, stage: int, microbatch: int) -> int:
        recorder = self._recorder
        name = recorder.name(kind)
        return self._append(OPEN, recorder.step_number, microbatch, stage, name, _monotonic_ns(), _NONE_I64, _NONE_I64)

    def finish(self, slot: int, wait_ns: int) -> None:
        self._finish(slot, _monotonic_ns(), wait_ns)


class _Mark(NamedTuple):
    """Kind, stage and microbatch of a transfer, attached to the operation until it is posted."""

    spans: _Spans
    kind: str
    stage: int
    microbatch: int


class _Posted(list[Any]):
    """Handles of transfers that were posted together, with their open spans."""

    opened: list[tuple[_Spans, int]]


def _marked(spans: _Spans, real: Any, kind: str, stage: int) -> Any:
    def marked(*args: Any, **kwargs: Any) -> Any:
        operations = real(*args, **kwargs)
        try:
            chunk = args[0] if args else next(iter(kwargs.values()))
            for operation in operations:
                operation.rankscope = _Mark(spans, kind, stage, chunk)
        except Exception as error:
            record_error("pipeline.mark", error)
        return operations

    return marked


def _follow_transfers() -> bool:
    """Wrap torch's functions that post and wait; unmarked operations pass through."""
    module: Any = sys.modules.get(_SCHEDULES)
    if module is None:
        return False
    if not getattr(module._batch_p2p, "rankscope", False):
        post, wait = _posting(module._batch_p2p), _waiting(module._wait_batch_p2p)
        post.rankscope = True  # type: ignore[attr-defined]
        module._batch_p2p, module._wait_batch_p2p = post, wait
    return True


def _posting(real: Any) -> Callable[..., Any]:
    def post(p2p_ops: list[Any], *args: Any, **kwargs: Any) -> Any:
        opened = []
        try:
            for operation in p2p_ops:
                mark = getattr(operation, "rankscope", None)
                if mark is not None:
                    opened.append((mark.spans, mark.spans.open(mark.kind, mark.stage, mark.microbatch)))
        except Exception as error:
            record_error("pipeline.post", error)
        handles = real(p2p_ops, *args, **kwargs)
        if not opened:
            return handles
        posted = _Posted(handles)
        posted.opened = opened
        return posted

    return post


def _waiting(real: Any) -> Callable[..., Any]:
    def wait(work: list[Any]) -> Any:
        if type(work) is not _Posted:
            return real(work)
        opened, work.opened = work.opened, []
        one_each = len(opened) == len(work)  # False if NCCL returned one handle for several operations
        parts = [[handle] for handle in work] if one_each else [list(work)]
        for number, part in enumerate(parts):
            start = _monotonic_ns()
            real(part)
            try:
                waited = _monotonic_ns() - start
                for spans, slot in opened[number : number + 1] if one_each else opened:
                    spans.finish(slot, waited)
                    waited = 0  # if a handle is shared, its wait counts once
            except Exception as error:
                record_error("pipeline.wait", error)
        return None

    return wait
