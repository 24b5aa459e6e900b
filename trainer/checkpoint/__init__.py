"""Copies of the training state: in memory every few steps, on disk at an interval, and which of them can be trusted."""
