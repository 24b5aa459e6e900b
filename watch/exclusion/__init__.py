"""Requests of `watch` to exclude slow ranks or broken devices from the run."""
