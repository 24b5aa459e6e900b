"""Drills on a training script of the user's own, which knows nothing of Rankscope."""
