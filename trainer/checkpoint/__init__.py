"""Copies of a training's state: in memory every few steps, on disk at an interval, and what may be trusted of them."""
