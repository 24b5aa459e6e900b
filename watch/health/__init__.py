"""What the devices and the host of a node do, read at about 1 Hz in `watch` and never in a rank.

device     what a source of readings is: a protocol, which a test's fake fits too
host       CPU, load, memory, paging, disk and network errors, from /proc
nvml       NVIDIA's GPUs through nvidia-ml-py, and their XID errors
dcgm       the same through a dcgm-exporter that runs already
sampler    threads that read them into table `health` and the events `xid`
"""

from __future__ import annotations
