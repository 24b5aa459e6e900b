"""Drills on a user's unmodified training script."""
