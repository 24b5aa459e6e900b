"""Verdicts on a run at any moment, also in the second in which it ends."""
