"""Stamp each wait of the compute stream for communication: a pair of events around it.

    undo = stamp_waits(recorder.stamps)        # before the loop; without stamps it does nothing

The host returns at once from a wait and goes on enqueuing; the stream stands still until what it waits for is over. Where
torch makes a stream wait:

| what | through |
|---|---|
| FSDP2's and FSDP's gathers and reductions, DeepSpeed, loops with their own streams | `torch.cuda.Event.wait`, by `Stream.wait_event` and `wait_stream` |
| synchronous collectives, pipeline messages, context parallel | `Work.wait` |
| tensor parallel, functional collectives | `wait_tensor` of `torch.distributed._functional_collectives` |
| DDP | its reducer in C++, in a callback of the autograd engine: one queued before it stamps its begin, the end of the backward pass its end |

Only waits of the stream that computes count; a wait for a stream that copies batches is one as well. Code that
`torch.compile` generated waits without Python: unstamped.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..fail_open import record_error
from ..torch_compat import functional_collectives, queue_callback
from .phase_events import PhaseEvents

__all__ = ["stamp_waits"]


def stamp_waits(stamps: PhaseEvents | None) -> Callable[[], None]:
    """Stamp waits from now on; returns what undoes it."""
    if stamps is None:
        return _nothing
    undo = [_wrap(torch.cuda.Event, "wait", stamps, is_ours=_is_compute_stream)]
    if torch.distributed.is_available():
        from torch.distributed import Work

        undo += [
            _wrap(Work, "wait", stamps),
            _wrap(functional_collectives(), "wait_tensor", stamps),
            *_wrap_ddp(stamps),
        ]

    def restore() -> None:
        for one in reversed(undo):
            one()

    return restore


def _wrap_ddp(stamps: PhaseEvents) -> list[Callable[[], None]]:
    """Stamp DDP's last wait in each backward pass in which a DDP module reduces gradients."""
    ddp: Any = nn.parallel.DistributedDataParallel
    forward, backward = ddp.forward, torch.autograd.backward
    reduces = False

    @functools.wraps(forward)
    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal reduces
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            reduces = bool(module.require_backward_grad_sync)
        return forward(module, *args, **kwargs)

    @functools.wraps(backward)
    def passed_back(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal reduces
        if reduces and stamps.is_open:
            reduces = False
            _stamp_end_of_backward(stamps, tensors)
        return backward(tensors, *args, **kwargs)

    return [_replace(ddp, "forward", called), _replace(torch.autograd, "backward", passed_back)]


def _stamp_end_of_backward(stamps: PhaseEvents, roots: Any) -> None:
    """Begin a wait when the backward pass from `roots` is over but for DDP's wait; the end of the phase ends it."""
    root = roots[0] if isinstance(roots, (list, tuple)) and roots else roots
    if not isinstance(root, Tensor) or not root.requires_grad:
        return

    def at_begin(_: Tensor) -> None:
        try:
            # DDP queues its own when all gradients are there: later, so that it runs after this one.
            queue_callback(stamps.enter_wait)
        except Exception as error:
            record_error("stream_waits", error)

    root.register_hook(at_begin)  # type: ignore[no-untyped-call]


def _wrap(owner: Any, name: str, stamps: PhaseEvents, is_ours: Callable[..., bool] | None = None) -> Callable[[], None]:
    real = getattr(owner, name)

    @functools.wraps(real)
    def wait(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not stamps.is_open or (is_ours is not None and not is_ours(*args)):
            return real(*args, **kwargs)
        stamps.enter_wait()
        try:
            return real(*args, **kwargs)
        finally:
            stamps.leave_wait()

    return _replace(owner, name, wait)


def _replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    real, inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, wrapper)

    def undo() -> None:
        if getattr(owner, name) is not wrapper:  # something has wrapped it since, and still calls ours
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, real)

    return undo


def _is_compute_stream(event: Any, stream: Any = None, *_: Any) -> bool:
    """Return True for the stream that the calling thread computes on."""
    return stream is None or stream == torch.cuda.current_stream()


def _nothing() -> None:
    """No stamps, nothing to undo."""
