"""fp8 matrix products in the blocks by torchao, which scales and rounds weights, activations and gradients.

    check_float8(config.train, device)               # ConfigError, one line, if fp8 is not available
    num_layers = convert_to_float8(model, config.train, tp=plan.tp)

A layer keeps its name and its parameter, in float32 or in the dtype to which FSDP casts it. For each matmul, operands
are rounded to fp8 with a newly computed scale (Micikevicius et al. 2022, arXiv 2209.05433). So gradients, optimizer
state, fingerprints and checkpoints have the same format as without fp8. Embedding, head, norms, routers and experts are
not converted. FSDP gathers unrounded weights, or already rounded ones (`trainer.parallel.float8_gather`).

`train.float8_emulated` rounds in the same way but multiplies in float32. It is slower than training without fp8, but
runs on any device, to test the effect of fp8 on the loss.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from trainer.config.config import TrainConfig
from trainer.config.load import ConfigError
from trainer.config.machine import check_float8_on
from trainer.model.transformer import Transformer

__all__ = ["check_float8", "convert_to_float8", "is_converted"]

MULTIPLE = 16
"""Rows and columns of fp8 matrix products must be multiples of this."""
_LAYERS = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""Minimum CUDA compute capability, by recipe."""


def check_float8(config: TrainConfig, device: torch.device) -> None:
    """Raise ConfigError if torchao is not installed, or the device does not support fp8."""
    if config.float8 == "none":
        return
    check_float8_on(config, device.type)
    if config.float8_emulated:
        return
    setting = f"train.float8 = {config.float8!r}"
    instead = "use train.precision = 'bf16', or train.float8_emulated = true to emulate fp8"
    needed, found = _CAPABILITY[config.float8], torch.cuda.get_device_capability(device)
    if torch.version.hip is None and found < needed:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{setting}: needs compute capability {needed[0]}.{needed[1]}, {name} has {found[0]}.{found[1]}; {instead}"
        )


def convert_to_float8(model: Transformer, config: TrainConfig, *, tp: int = 1) -> int:
    """Convert the blocks' layers that fp8 supports, in place, before anything is sharded; returns their number.

    Raises ConfigError if there is none.
    """
    if config.float8 == "none":
        return 0
    # torchao warns about extensions that this torch cannot load, none of which is needed here.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig
    from torchao.float8 import convert_to_float8_training as convert

    recipe = Float8LinearConfig.from_recipe_name(config.float8)
    if config.float8_emulated:
        recipe = dataclasses.replace(recipe, emulate=True)
    for block in model.blocks.values():
        convert(block, config=recipe, module_filter_fn=lambda layer, name: name in _LAYERS and _fits(layer, tp))
    count = sum(is_converted(layer) for layer in model.modules())
    if not count and len(model.blocks):
        raise ConfigError(
            f"train.float8 = {config.float8!r}: no layer has rows and columns that are multiples of {MULTIPLE} on each "
            f"of {tp} tensor-parallel ranks; change model.dim and model.hidden_dim"
        )
    return count


def is_converted(layer: nn.Module) -> bool:
    """Return True for a layer that multiplies in fp8."""
    return type(layer).__name__ == "Float8Linear"


def _fits(layer: nn.Module, tp: int) -> bool:
    """Return True if fp8 supports the layer, whichever dimension tensor parallelism splits."""
    return isinstance(layer, nn.Linear) and all(size % (MULTIPLE * tp) == 0 for size in layer.weight.shape)
