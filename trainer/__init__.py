"""The instrumented trainer: configuration, model, parallelism, checkpoints, recovery, launch and fault drills."""
