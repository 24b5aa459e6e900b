"""Acceptance test on a GPU: one command that checks everything that needs one.

`check`        a check, where it runs, its result; scripts started as ranks under `rankscope run`
`environment`  versions, the plugin, readings of NVML
`crashes`      former crashes and recording errors, each in separate processes
`cost`         events, kernels, copies and waits that the probes add, and their time
`training`     MFU, drills, memory compared with the plan
"""
