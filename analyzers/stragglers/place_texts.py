"""Words for the phase or gap in which a rank is slow, as they follow "computes" or "per step"."""

from __future__ import annotations

from analyzers.run.recorded_calls import MAX_NAME

__all__ = ["PLACE_TEXTS", "phase_text"]


PLACE_TEXTS = {
    "forward": " in forward", "backward": " in backward", "optimizer": " in the optimizer",
    "before_forward": " before the forward pass", "forward_to_backward": " between forward and backward",
    "backward_to_optimizer": " between backward and the optimizer", "after_optimizer": " after the optimizer",
}  # fmt: skip


def phase_text(name: str) -> str:
    """Words for a phase of the loop's own name."""
    return f" in its phase {name[:MAX_NAME]}"
