"""Acceptance on a GPU: one command that tries everything which no machine without one can show.

`check`        a check, its place and its result; scripts started as ranks under `rankscope run`
`environment`  versions, the plugin, readings of NVML
`crashes`      what once crashed or could not be recorded, each in processes of its own
`cost`         events, kernels, copies and waits that the probes add, and what they cost
`training`     MFU, drills, memory against the plan
"""
