"""AdamW with 8-bit moments for matrices: a code of one byte per number, and a scale per block of numbers.

    optimizer = AdamW8bit(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)

Groups with `eight_bit = True` have matrices only. A moment is read as float32, updated as by AdamW, and written back as
the nearest of the 256 values of dynamic quantisation (Dettmers et al. 2022, arXiv 2110.02861), scaled by the largest
magnitude of its block. Norms have float32 moments. As in the paper, the embedding does so too, because a step changes
only a few of its rows.

A block lies within one row. So a shard of rows has the codes and scales of these rows, and a checkpoint can be loaded
in any layout that splits no block; `trainer.layout.constraints` refuses other layouts. Codes and scales are plain
tensors (DTensors for a sharded matrix), which copies, fingerprints and checkpoints support.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.training.adamw_fallback import AdamWFallback, local_tensor

__all__ = ["BLOCK", "STATE_KEYS", "AdamW8bit", "empty_state", "is_eight_bit"]

BLOCK = 128
"""How many numbers share a scale. Most libraries use 256, but tensor parallelism would split such blocks in small
models."""
STATE_KEYS = ("exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales", "step")
DECADES = 7
"""Number of powers of ten that the codes cover. Each power has twice as many values as the next lower one."""


def is_eight_bit(name: str, parameter: Tensor) -> bool:
    """Return True if the moments of the parameter are kept in 8 bits."""
    return parameter.dim() == 2 and not name.startswith("embed.") and parameter.shape[1] % BLOCK == 0


class AdamW8bit(AdamWFallback):
    """AdamW with 8-bit moments for groups with `eight_bit = True`, and with float32 moments for other groups."""

    mark = "eight_bit"

    def __init__(self, groups: list[dict[str, Any]], **adamw: Any) -> None:
        super().__init__(groups, {}, **adamw)

    def _update(self, parameter: Tensor, group: dict[str, Any], skipped: Tensor | None) -> None:
        state = self.state[parameter]
        if "step" not in state:
            state |= {key: empty_state(parameter, key) for key in STATE_KEYS[:-1]}
            on_device = group["fused"] or group["capturable"]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
        assert parameter.grad is not None
        own, gradient = local_tensor(parameter), local_tensor(parameter.grad)
        old = [local_tensor(state[key]) for key in STATE_KEYS[:-1]]
        (beta, beta_sq), step = group["betas"], state["step"] + 1
        mean = _read(old[0], old[1], signed=True).lerp_(gradient, 1 - beta)
        square = _read(old[2], old[3], signed=False).mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
        change = square.sqrt().div_((1 - beta_sq**step).sqrt()).add_(group["eps"])
        torch.div(mean, change, out=change)
        change.mul_(-group["lr"] / (1 - beta**step))
        changed = change.add_(own, alpha=1 - group["lr"] * group["weight_decay"])
        _write(own, changed, skipped)
        del change, changed  # reuse the float32 moments' memory
        for codes, scales, moment, signed in ((old[0], old[1], mean, True), (old[2], old[3], square, False)):
            new_codes, new_scales = _coded(moment, signed=signed)
            _write(codes, new_codes, skipped)
            _write(scales, new_scales, skipped)
        _write(state["step"], step, skipped)


def empty_state(parameter: Tensor, key: str) -> Tensor:
    """A tensor of a parameter's state before its first update, on the parameter's device and sharded like it. `key`:
    name of the tensor."""
    own = local_tensor(parameter)
    if key.endswith("_codes"):
        return _sharded_like(torch.zeros_like(own, dtype=torch.uint8), parameter, parameter.shape[1])
    scales = own.new_zeros(own.shape[0], own.shape[1] // BLOCK, dtype=torch.float32)
    return _sharded_like(scales, parameter, parameter.shape[1] // BLOCK)


def _sharded_like(own: Tensor, parameter: Tensor, columns: int) -> Tensor:
    """Return this rank's part as a DTensor with the placements of `parameter`, if that is sharded."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size((parameter.shape[0], columns)),
        stride=(columns, 1),
    )


def _write(target: Tensor, value: Tensor, skipped: Tensor | None) -> None:
    target.copy_(value if skipped is None else torch.where(skipped.to(target.device), target, value))


def _read(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Decode to float32."""
    values, _ = _table(signed, codes.device)
    found = values[codes.int()]
    found.view(-1, BLOCK).mul_(scales.view(-1, 1))
    return found


def _coded(moment: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode a float32 moment as codes and scales. This is the inverse of `_read`, and overwrites the moment."""
    _, borders = _table(signed, moment.device)
    blocks = moment.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) if signed else blocks.amax(1, keepdim=True)
    blocks.div_(scales.clamp(min=torch.finfo(torch.float32).tiny))
    codes = torch.bucketize(moment, borders, out_int32=True, right=True).to(torch.uint8)
    return codes, scales.view(moment.shape[0], -1)


@functools.lru_cache(maxsize=8)
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values in ascending order, and the 255 borders at which the nearest value changes.

    Magnitudes are spaced evenly within each power of ten, with twice as many as in the power below; 0 and 1 are added.
    """
    magnitudes = []
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1)
        magnitudes.append((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1))
    both = [*magnitudes, *(-each for each in magnitudes)] if signed else magnitudes
    values = torch.cat([*both, torch.tensor([0.0, 1.0])]).sort().values
    borders = (values[:-1] + values[1:]) / 2
    return values.to(device), borders.to(device)
