"""Replay of a step with every operation watched, to see whether a fault recurs and where it starts."""
