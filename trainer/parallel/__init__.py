"""Parallelism on torch's own implementations, one file a kind; `parallelize.parallelize` applies a plan to a model."""
