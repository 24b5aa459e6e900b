"""Played devices: virtual GPUs and a virtual NCCL that drive the real probes without a device.

`nccl_interface`  NCCL's profiler interface, versions 1 to 7, through ctypes
`streams`         hosts that run ahead, streams, kernels and collectives on a virtual clock
`programs`        steps of DDP, FSDP2, tensor and pipeline parallel training as operations of hosts and streams
`faults`          faults, and the expected diagnosis of each
`device`          a played CUDA device for torch: tensors without memory, streams and events that count
`step_budget`     what attaching adds to a step on it, over a fake process group of up to 512 ranks
`recording`       a played run on disk: tapes written by the real recorder and the real plugin
"""
