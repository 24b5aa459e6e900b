"""Decide whether the loss is computed in chunks, and the number of tokens per chunk (`trainer.model.chunked_loss`)."""

from __future__ import annotations

from trainer.config.config import TrainConfig
from trainer.layout.plan import Plan

__all__ = ["is_chunked", "tokens_at_once"]

_LOGITS_AT_ONCE = 2**29
"""Maximum elements of a chunk's logits: 1 GiB in 16 bits. Smaller chunks read and write the weight gradient more
often.
"""
_ROUNDED_TO = 1024


def is_chunked(config: TrainConfig, plan: Plan, device_type: str) -> bool:
    """Return `train.chunked_loss` with `auto` resolved. Pipeline schedules need logits, so the loss is not chunked
    there.
    """
    wanted = device_type == "cuda" if config.chunked_loss == "auto" else config.chunked_loss
    return wanted and plan.pp == 1


def tokens_at_once(vocab_size: int) -> int:
    """Number of tokens per chunk."""
    return max(_ROUNDED_TO, _LOGITS_AT_ONCE // vocab_size // _ROUNDED_TO * _ROUNDED_TO)
