"""Replay of a step with every operation watched, to see whether the fault recurs and where it starts."""
