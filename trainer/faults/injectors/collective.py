"""Faults of communication: one rank calls a different collective than its peers, in a different order, or none.

    ARM["wrong_collective"](trigger, training)

Faults of a single call replace the first all-reduce of the training loop in the step (that of the loss), as if the
faulty rank had taken another branch in the training script.
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


def _arm_replaced_call(trigger: Trigger, training: Training) -> None:
    """Patch `dist.all_reduce` for one call only, so that the records name the loop as the caller of all other calls."""
    replacement = _REPLACEMENTS[trigger.fault.kind]

    class ReplacingCall(FaultyLoader):
        def before(self) -> None:
            if trigger.step != trigger.fault.step:
                return
            real = dist.all_reduce

            def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                dist.all_reduce = real
                return replacement(tensor) if trigger.due() else real(tensor, *args, **kwargs)

            dist.all_reduce = all_reduce

    ReplacingCall(training)


def _skip(tensor: Tensor) -> None:
    """Skip the call, as if its branch had not been taken."""


def _gather(tensor: Tensor) -> None:
    dist.all_gather([torch.empty_like(tensor) for _ in range(dist.get_world_size())], tensor)


def _double_size(tensor: Tensor) -> None:
    dist.distributed_c10d.all_reduce(torch.cat((tensor, tensor)))


def _other_dtype(tensor: Tensor) -> None:
    dist.distributed_c10d.all_reduce(tensor.float() if tensor.dtype == torch.float64 else tensor.double())


_REPLACEMENTS: Mapping[str, Callable[[Tensor], None]] = {
    "skip_collective": _skip,
    "wrong_collective": _gather,
    "wrong_size": _double_size,
    "wrong_dtype": _other_dtype,
}


def _arm_order_inversion(trigger: Trigger, training: Training) -> None:
    """Let the rank and its neighbour call two groups in opposite order."""
    world_size, first = training.plan.world_size, trigger.fault.rank
    if world_size < 2:
        raise FaultError("--fault order_inversion: needs more than one rank")
    pair = sorted((first, (first + 1) % world_size))
    groups = [dist.new_group(pair, group_desc=name) for name in ("first", "second")]
    if trigger.rank not in pair:
        return
    if not trigger.is_target:
        groups.reverse()
    tensor = torch.zeros(1)

    class OrderInversion(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                for group in groups:
                    dist.all_reduce(tensor, group=group)

    OrderInversion(training)


def _arm_missing_send(trigger: Trigger, training: Training) -> None:
    """Drop the step's first message from one of the rank's stages."""
    if training.pipeline is None:
        raise FaultError("--fault missing_send: parallel.pp = 1: there is no pipeline; must be 2 or more")
    for stage in training.pipeline.stages:
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            setattr(stage, name, _without_first(getattr(stage, name), trigger))


def _without_first(sends: Callable[[int], list[Any]], trigger: Trigger) -> Callable[[int], list[Any]]:
    def remaining(microbatch: int) -> list[Any]:
        ops = sends(microbatch)
        return ops[1:] if ops and trigger.due() else ops

    return remaining


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    **dict.fromkeys(_REPLACEMENTS, _arm_replaced_call),
    "order_inversion": _arm_order_inversion,
    "missing_send": _arm_missing_send,
}
