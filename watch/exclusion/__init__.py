"""Requests of `watch` to leave slow ranks or broken devices out of the run."""
