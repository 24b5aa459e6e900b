"""torch.profiler on a schedule and on request, and ranges around phases."""
