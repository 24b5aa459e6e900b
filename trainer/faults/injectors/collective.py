"""Faults of communication: a rank that calls something else than the others, in another order, or not at all.

    ARM["wrong_collective"](trigger, training)

They strike the first all-reduce that the loop itself makes in the step, the one of the loss: as if the faulty rank
had taken another branch in the training script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.faults.options import FaultError
from trainer.faults.trigger import FaultyLoader, Trigger
from trainer.training.rank_training import Training

__all__ = ["ARM"]


def _arm_diverted(trigger: Trigger, training: Training) -> None:
    """Changed for the one call only: a wrapper that stayed would be the caller that the records name."""
    instead = _INSTEAD[trigger.fault.kind]

    class Diverting(FaultyLoader):
        def before(self) -> None:
            if trigger.step != trigger.fault.step:
                return
            real = dist.all_reduce

            def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                dist.all_reduce = real
                return instead(tensor) if trigger.due() else real(tensor, *args, **kwargs)

            dist.all_reduce = all_reduce

    Diverting(training)


def _skip(tensor: Tensor) -> None:
    """Skip the call, as if its branch had not been taken."""


def _gather(tensor: Tensor) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor)


def _twice_as_long(tensor: Tensor) -> None:
    dist.distributed_c10d.all_reduce(torch.cat((tensor, tensor)))


def _other_type(tensor: Tensor) -> None:
    dist.distributed_c10d.all_reduce(tensor.float() if tensor.dtype == torch.float64 else tensor.double())


_INSTEAD: Mapping[str, Callable[[Tensor], None]] = {
    "skip_collective": _skip,
    "wrong_collective": _gather,
    "wrong_size": _twice_as_long,
    "wrong_dtype": _other_type,
}


def _arm_order_inversion(trigger: Trigger, training: Training) -> None:
    """Two groups of the rank and its neighbour, which the two take in opposite order."""
    world_size, first = training.plan.world_size, trigger.fault.rank
    if world_size < 2:
        raise FaultError("--fault order_inversion: needs more than one rank")
    pair = sorted((first, (first + 1) % world_size))
    one, other = dist.new_group(pair, group_desc="first"), dist.new_group(pair, group_desc="second")
    if trigger.rank not in pair:
        return
    order = (one, other) if trigger.strikes else (other, one)
    number = torch.zeros(1)

    class Inverted(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                for group in order:
                    dist.all_reduce(number, group=group)

    Inverted(training)


def _arm_missing_send(trigger: Trigger, training: Training) -> None:
    """The first message of the step from one of the rank's stages is left out."""
    if training.pipeline is None:
        raise FaultError("--fault missing_send: parallel.pp = 1: there is no pipeline; must be 2 or more")
    for stage in training.pipeline.stages:
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            setattr(stage, name, _without_first(getattr(stage, name), trigger))


def _without_first(sends: Callable[[int], list[Any]], trigger: Trigger) -> Callable[[int], list[Any]]:
    def left(microbatch: int) -> list[Any]:
        ops = sends(microbatch)
        return ops[1:] if ops and trigger.due() else ops

    return left


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    **dict.fromkeys(_INSTEAD, _arm_diverted),
    "order_inversion": _arm_order_inversion,
    "missing_send": _arm_missing_send,
}
