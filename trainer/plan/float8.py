"""Operations that run in fp8 with `train.float8`: the matmuls of the layers that `trainer.model.float8` converts.

    found = float8_products(config, plan, hardware)     # None if no matmul is in fp8, or its rate is unknown
    found.flops_per_token, found.flops_per_s
    found.others                                        # operations that remain in train.precision

A layer's three matmuls (forward and both gradients) are all in fp8. The cost of scaling and rounding is not modelled;
emulated matmuls run in float32, and are slower than without fp8.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config.config import Config, ModelConfig
from trainer.layout.constraints import FLOAT8_MULTIPLE
from trainer.layout.plan import Plan
from trainer.plan.hardware import Hardware

__all__ = ["Float8Products", "float8_products"]

_FLOPS_PER_WEIGHT = 6  # per token, forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Products:
    flops_per_token: int
    flops_per_s: float
    """The device's dense peak."""
    has_feed_forward: bool
    """True if the largest matmul of a block is in fp8."""
    others: tuple[str, ...]
    """Operations that run in the training precision."""


def float8_products(config: Config, plan: Plan, hardware: Hardware) -> Float8Products | None:
    rate = hardware.flops_per_s.get(config.train.float8)
    if rate is None or config.train.float8_emulated:
        return None
    model = config.model
    layers = _layers(model)
    multiple = FLOAT8_MULTIPLE * plan.tp
    fitting = {name: math.prod(shape) for name, shape in layers.items() if all(not size % multiple for size in shape)}
    if not fitting:
        return None  # the trainer refuses fp8 for such a model
    others = ["attention's scores", "head", *(["routers", "experts"] if model.num_experts else [])]
    return Float8Products(
        flops_per_token=_FLOPS_PER_WEIGHT * model.num_layers * sum(fitting.values()),
        flops_per_s=rate,
        has_feed_forward="gate" in fitting,
        others=(*others, *(name for name in layers if name not in fitting)),
    )


def _layers(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of a block's linear layers."""
    width, keys = model.dim, model.kv_heads * (model.dim // model.num_heads)
    attention = {"query": (width, width), "key": (keys, width), "value": (keys, width), "out": (width, width)}
    if model.num_experts:
        return attention
    hidden = model.ffn_dim
    return {**attention, "gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
