"""Captures of torch's profiler: one rank's steps, and a rank against its peer."""
