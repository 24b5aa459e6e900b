"""Parallelism on torch's implementations, one file per kind; `parallelize.parallelize` applies a plan to a model."""
