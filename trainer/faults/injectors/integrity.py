"""Faults that corrupt the state: flipped bits, and a part that is not restored after a restart.

    bit_flip@step=12,rank=2,where=parameter,tensor=blocks.1.mlp.up.weight,bit=20

`where` is parameter, optimizer (its mean gradient, or the state with a full name such as `blocks.1.mlp.up.weight.step`)
or gradient (of this rank, before it is reduced). One bit of one element is flipped, in the middle of the rank's local
part of the tensor. This happens between the previous optimizer step and the forward pass, when nothing else writes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.disk_tier import checkpoints as disk
from trainer.checkpoint.disk_tier import loading
from trainer.checkpoint.disk_tier.loading import Loaded
from trainer.checkpoint.state import local_tensors, restore_rng, rng_state, training_tensors
from trainer.faults.options import FaultError
from trainer.faults.trigger import FaultyLoader, Trigger, change_gradient
from trainer.training.optimizer import state_keys
from trainer.training.rank_training import Training

__all__ = ["ARM", "flip_bit"]

DEFAULT_BIT = 22
"""The highest fraction bit of a float32. Flipping it changes a number by up to a half, which does not show in the
loss."""
HIGHEST_EXPONENT_BIT = 30
"""The highest exponent bit of a float32, which is zero in any gradient below 2. Flipping it gives a finite number above
10^30, which would ruin the model.
"""
HIGHEST_BIT = 31
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(tensor: Tensor, bit: int, element: int = -1) -> None:
    """Flip one bit of an element of a plain tensor. `element` -1: the middle element."""
    words = tensor.detach().view(_INTEGERS[tensor.itemsize])
    element = words.numel() // 2 if element < 0 else element
    index = tuple(int(place) for place in torch.unravel_index(torch.tensor(element), words.shape))
    mask = 1 << bit
    # The highest bit is the sign of the integer.
    words[index] ^= mask - (1 << 8 * words.itemsize) if bit == 8 * words.itemsize - 1 else mask


def _arm_bit_flip(trigger: Trigger, training: Training) -> None:
    """Prepare the flip. Raises FaultError for a tensor or bit that does not exist."""
    fault = trigger.fault
    of_gradient = fault.kind == "bit_flip_gradient" or fault.where == "gradient"
    bit = fault.bit if fault.bit >= 0 else HIGHEST_EXPONENT_BIT if of_gradient else DEFAULT_BIT
    if fault.where in ("rng", "data"):
        raise FaultError(f"--fault {fault.kind}: where = {fault.where!r}: must be parameter, optimizer, gradient")
    where = fault.where or ("optimizer" if fault.kind == "bit_flip_optimizer" else "parameter")
    name = fault.tensor or f"blocks.{list(training.modules[-1].blocks)[-1]}.mlp.up.weight"
    parameters = dict(training.named_parameters())
    if bit > HIGHEST_BIT:
        raise FaultError(f"--fault {fault.kind}: bit = {bit}: must be from 0 to {HIGHEST_BIT}")
    if name not in parameters and (where != "optimizer" or name.rpartition(".")[0] not in parameters):
        raise FaultError(f"--fault {fault.kind}: tensor = {name!r}: not a parameter on rank {trigger.rank}")
    if of_gradient:
        _arm_gradient(trigger, training, name, bit)
        return
    state = f"{name}.{state_keys(training.optimizer, parameters[name])[0]}" if name in parameters else name
    wanted = f"model.{name}" if where == "parameter" else f"optimizer.{state}"

    class Flipping(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                tensors = local_tensors(training_tensors(training))
                if wanted not in tensors or not tensors[wanted].numel():
                    raise FaultError(f"--fault {fault.kind}: tensor = {wanted!r}: this rank holds nothing of it yet")
                flip_bit(tensors[wanted], bit)

    Flipping(training)


def _arm_gradient(trigger: Trigger, training: Training, name: str, bit: int) -> None:
    def flipped(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        flip_bit(changed.to_local() if isinstance(changed, DTensor) else changed, bit)
        return changed

    change_gradient(trigger, training, name, flipped)


def _arm_skip_restore(trigger: Trigger, training: Training) -> None:
    """Kill the rank at the fault's step. In the next attempt, leave a part of the state as it was before the checkpoint
    was loaded.
    """
    where = trigger.fault.where or "rng"
    if where == "gradient":
        raise FaultError("--fault skip_restore: where = 'gradient': must be parameter, optimizer, rng, data")
    if not trigger.spent:

        class Dying(FaultyLoader):
            def before(self) -> None:
                if trigger.due():
                    os.kill(os.getpid(), signal.SIGKILL)

        Dying(training)
    elif where == "data":
        training.stream.seed += 1
    else:
        _keep_from_loading(training, where)


def _keep_from_loading(training: Training, where: str) -> None:
    load = loading.load_folder

    def load_but_one_part(folder: Path, into: Training) -> Loaded:
        rng = rng_state(training.device)
        kept = {name: value.clone() for name, value in local_tensors(training_tensors(training)).items()}
        loaded = load(folder, into)
        if where == "rng":
            restore_rng(rng, training.device)
        prefix = {"parameter": "model.", "optimizer": "optimizer."}.get(where)
        for name, value in local_tensors(training_tensors(training)).items():
            if prefix and name.startswith(prefix):
                value.copy_(kept.get(name, torch.zeros_like(value)))  # a new optimizer has no state yet
        return loaded

    disk.load_folder = load_but_one_part  # type: ignore[attr-defined, assignment]  # replaced for this run only


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    "bit_flip": _arm_bit_flip,
    "bit_flip_optimizer": _arm_bit_flip,
    "bit_flip_gradient": _arm_bit_flip,
    "skip_restore": _arm_skip_restore,
}
"""Function that arms a rank, by kind."""
