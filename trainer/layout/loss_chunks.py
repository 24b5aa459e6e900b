"""Decide whether the loss is computed in chunks, and the number of tokens per chunk (`trainer.model.chunked_loss`)."""

from __future__ import annotations

from trainer.config.config import TrainConfig
from trainer.layout.plan import Plan

__all__ = ["is_chunked", "tokens_at_once"]

_LOGITS_AT_ONCE = 2**29
"""Maximum number of elements in the logits of a chunk: 1 GiB in 16 bits. With smaller chunks, the weight gradient is
read and written more often.
"""
_ROUNDED_TO = 1024


def is_chunked(config: TrainConfig, plan: Plan, device_type: str) -> bool:
    """Return `train.chunked_loss` with `auto` resolved. In a pipeline the loss is not chunked: torch's schedules need
    logits.
    """
    wanted = device_type == "cuda" if config.chunked_loss == "auto" else config.chunked_loss
    return wanted and plan.pp == 1


def tokens_at_once(vocab_size: int) -> int:
    """Number of tokens per chunk."""
    return max(_ROUNDED_TO, _LOGITS_AT_ONCE // vocab_size // _ROUNDED_TO * _ROUNDED_TO)
