"""`torch.compile`, block by block: one compilation serves all blocks, and module hooks stay outside of it.

    compile_blocks(model, "inductor")
    with uncompiled(): model(tokens)        # each operation is visible

The compiled part contains a block's layers, and with tensor parallelism their collectives. FSDP's gathers, activation
checkpointing, DDP's reducer and the probes remain around it, in Python, so names and checkpoints do not change. Only
selective checkpointing is compiled with the layers, because it selects among their operations, which are not visible
from outside; the compiler keeps the selected results.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.config.config import TrainConfig
from trainer.layout.plan import Plan
from trainer.model.checkpointing import selective_contexts
from trainer.model.chunked_loss import Softmax
from trainer.model.transformer import Block, Transformer

__all__ = ["compile_blocks", "is_compiled", "uncompiled"]


def is_compiled(config: TrainConfig, plan: Plan, device: torch.device) -> bool:
    """Return `train.compile` with `auto` resolved."""
    if config.compile != "auto":
        return config.compile
    return device.type == "cuda" and plan.compiles and (config.compile_backend != "inductor" or _has_triton())


def _has_triton() -> bool:
    """Return True if Triton, which generates the kernels, can compile its launchers (in C)."""
    compilers = (os.environ.get("CC", ""), "gcc", "clang", "cc")
    return importlib.util.find_spec("triton") is not None and any(name and shutil.which(name) for name in compilers)


def compile_blocks(model: Transformer, backend: str) -> None:
    """Compile each block of `model` when it first runs, and the softmax of a chunked loss. Call it after
    `apply_activation_checkpointing`.
    """
    model.compiled = True
    model.output_loss.softmax = Softmax.compiled(backend)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        layer = block.layer
        if block.recompute is selective_contexts:
            block.recompute, layer = None, _selectively_checkpointed(layer)
        block.compiled = torch.compile(layer, backend=backend, dynamic=False)


def _selectively_checkpointed(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checkpointed(x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        out: Tensor = checkpoint(layer, x, cos, sin, mask, use_reentrant=False, context_fn=selective_contexts)
        return out

    return checkpointed


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled blocks eagerly within the context."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
