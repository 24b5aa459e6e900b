"""Loss of a language model: cross-entropy per token, whole or split along the vocabulary.

A loss in chunks is computed by the model from its hidden states instead (`trainer.model.transformer`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["token_loss"]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, in float32; logits may be split along the vocabulary."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    # With split logits the loss is a DTensor, equal on every rank; callers expect a plain tensor.
    return loss.to_local() if isinstance(loss, DTensor) else loss
