"""Loss of a language model: cross-entropy per token, whole or split along the vocabulary.

Where `is_chunked`, a model computes it itself, from its hidden states (`trainer.model.output_loss`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.config.config import TrainConfig
from trainer.layout.plan import Plan

__all__ = ["is_chunked", "token_loss"]


def is_chunked(config: TrainConfig, plan: Plan, device: torch.device) -> bool:
    """Return `train.chunked_loss`, or what `auto` means here. A pipeline's schedule takes logits."""
    wanted = device.type == "cuda" if config.chunked_loss == "auto" else config.chunked_loss
    return wanted and plan.pp == 1


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, in float32; logits may be split along the vocabulary."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    # Split logits give a loss that is the same DTensor on every rank; the rest of the world works with plain tensors.
    return loss.to_local() if isinstance(loss, DTensor) else loss
