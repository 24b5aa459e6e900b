"""Words for the phase or gap in which a rank is slow, as they follow "computes" or "per step"."""

from __future__ import annotations

__all__ = ["PLACE_TEXTS"]

PLACE_TEXTS = {
    "forward": " in forward", "backward": " in backward", "optimizer": " in the optimizer",
    "before_forward": " before the forward pass", "forward_to_backward": " between forward and backward",
    "backward_to_optimizer": " between backward and the optimizer", "after_optimizer": " after the optimizer",
}  # fmt: skip
