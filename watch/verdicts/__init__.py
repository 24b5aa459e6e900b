"""Verdicts on a run at any time, even while it is ending."""
