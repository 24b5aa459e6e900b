"""Activation checkpointing: which activations backward recomputes instead of keeping them.

full         every block keeps only its input
every_n      every n-th block keeps only its input
selective    blocks keep the results of matmuls and attention, and recompute the rest, which is cheap
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from trainer.config.config import TrainConfig
from trainer.model.transformer import Block, Transformer
from trainer.torch_compat import COSTLY_COLLECTIVES, ignore_profiler_marks

__all__ = ["apply_activation_checkpointing", "selective_contexts"]

_aten = torch.ops.aten
_SAVED_OPERATIONS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    # The results of these collectives are kept, because repeating the collectives in backward costs more.
    *COSTLY_COLLECTIVES,
}


def apply_activation_checkpointing(model: Transformer, config: TrainConfig) -> None:
    """Set what each block of `model` recomputes, without changing names or modules."""
    kind = config.activation_checkpointing
    if kind == "none":
        return
    if kind == "selective":
        ignore_profiler_marks()
    for name, block in model.blocks.items():
        assert isinstance(block, Block)
        if kind == "every_n" and int(name) % config.checkpoint_every_n:
            continue
        block.recompute = selective_contexts if kind == "selective" else noop_context_fn


def selective_contexts() -> Any:
    """The contexts of a selective forward and of its recomputation, for torch's `checkpoint`."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]  # torch: no types


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
