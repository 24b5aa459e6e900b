"""Health of a node's devices and host, sampled once a second in `watch` and never in a rank.

device     protocols of sources, and their readings
host       CPU, load, memory, paging, disk and network errors, from /proc
nvml       NVIDIA GPUs through nvidia-ml-py, and their XID errors
dcgm       the same through a running dcgm-exporter
sampler    threads that write them to table `health` and to events `xid`
"""

from __future__ import annotations
