"""Loss of a language model: cross-entropy per token, whole or split along the vocabulary.

The chunked loss is not computed here, but by the model from its hidden states (`trainer.model.transformer`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["token_loss"]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, in float32. The logits may be split along the vocabulary."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    # With split logits the loss is a DTensor, equal on every rank; callers expect a plain tensor.
    return loss.to_local() if isinstance(loss, DTensor) else loss
