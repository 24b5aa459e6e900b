"""A recording as ranks on GPUs write it: calls from the NCCL plugin, and steps as far as hosts can time them.

    columns = step_columns(log.columns("steps", until))
    calls, communicators = nccl_columns(log, log.columns("collectives", until), until, is_closed=True)

1. Where events on the device could not be recorded, the step clock measures neither the device's phases and gaps nor
   waits: they are UNSET. Data loading, checkpoints and evaluations are timed on the host. With stamps all times are the
   device's, which idles while the host loads data and in all gaps. Spans have no wait.
2. Calls are the plugin's (`nccl_calls`): enqueued and launched when the rank reaches them, started when the previous
   call of the same group, or pair, has ended, and spinning until the last member's has started. Calls queued behind one
   that never ends neither start nor end.
3. What only the wrapper knows is missing: shapes, callers, whether a buffer held NaN, how long a host waited.

Simplified: the host does not run ahead of its device, so its spans are as long as the device's work.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from probes.step_clock import GAPS, not_measured_on_devices
from probes.tape.format.schema import UNSET
from probes.tape.format.writer import COMPLETE, OPEN

from .layout import WORLD, Layout
from .records import Columns, Floats, Log

__all__ = [
    "GROUPS_FIRST_ID",
    "communicators_of",
    "nccl_columns",
    "nccl_queue_times",
    "span_columns",
    "stamped_columns",
    "step_columns",
]

GROUPS_FIRST_ID = 1
_NONE_I32, _NONE_I64 = int(UNSET["i32"]), int(UNSET["i64"])
LAUNCH_NS, SEEN_LATE_NS = 3_000, 2_000
CHANNELS = 2
INTERFACE_VERSION, EVENT_MASK = 5, 0b111_0001
_FUNCTIONS = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "broadcast": "Broadcast",
    "barrier": "AllReduce", "send": "Send", "recv": "Recv",
}  # fmt: skip
_DTYPES = {"float32": ("ncclFloat32", 4), "float64": ("ncclFloat64", 8), "bfloat16": ("ncclBfloat16", 2),
           "int64": ("ncclInt64", 8)}  # fmt: skip


def step_columns(columns: Columns) -> Columns:
    """The `steps` of a rank on a GPU, one of several."""
    return columns | {name: np.full_like(columns[name], _NONE_I64) for name in not_measured_on_devices()}


def stamped_columns(columns: Columns) -> Columns:
    """The `steps` of a rank on a GPU whose device was stamped in every step."""
    done = columns["state"] == COMPLETE
    found = columns | {"stamped_steps": np.where(done, 1, _NONE_I64)}
    for part in ("data", "forward", "backward", "optimizer", *GAPS):
        is_idle = part == "data" or part in GAPS
        idle_ns = columns[f"{part}_ns"] - columns[f"{part}_wait_ns"] if is_idle else np.zeros_like(columns["step"])
        found[f"{part}_late_ns"] = np.where(done, np.maximum(idle_ns, 0), _NONE_I64)
    return found


def span_columns(columns: Columns) -> Columns:
    """The `spans` of such a rank."""
    return columns | {"wait_ns": np.full_like(columns["wait_ns"], _NONE_I64)}


def communicators_of(layout: Layout) -> list[str]:
    """The dimensions whose groups a rank has a communicator of, in the order of their numbers."""
    return [WORLD, *layout.used_dims()]


def nccl_columns(log: Log, collectives: Columns, until: Floats, *, is_closed: bool) -> tuple[Columns, Columns]:
    """Columns of `nccl_calls` and of `nccl_communicators`. `until`: when each rank stopped writing, ns."""
    layout = log.layout
    rank, issue, end = collectives["rank"], collectives["issue_ns"], collectives["end_ns"]
    groups = communicators_of(layout)
    communicator, size = np.zeros(len(rank), np.int64), np.ones(len(rank), np.int64)
    for number, dim in enumerate(groups):
        in_group = collectives["process_group"] == log.label_ids(dim)[rank]
        communicator[in_group], size[in_group] = number, layout.members(dim).shape[1]
    peer = collectives["peer"]
    stage = layout.coordinates()["pp"]
    peer = np.where(peer < 0, _NONE_I32, stage[np.maximum(peer, 0)])
    start, end = nccl_queue_times(rank, communicator, collectives["op"], peer, issue, end, until)
    texts = ["", *log.names.texts]
    function, dtype, item = (np.zeros(len(texts), np.int64) for _ in range(3))
    for number, text in enumerate(texts):
        function[number] = log.names(_FUNCTIONS.get(text, ""))
        name, item[number] = _DTYPES.get(text, ("", 1))
        dtype[number] = log.names(name)
    is_message, done = peer >= 0, end >= 0
    count = collectives["bytes"] // item[collectives["dtype"]]
    count = np.where(function[collectives["op"]] == log.names("ReduceScatter"), count // size, count)
    channels = np.where(is_message, 1, (1 << CHANNELS) - 1)
    position = np.arange(len(rank)) - np.searchsorted(rank, rank)
    calls: Columns = {
        "call": position, "seq": collectives["seq"], "nccl_seq": np.where(is_message, _NONE_I64, collectives["seq"]),
        "count": count, "enqueue_ns": issue, "launched_ns": np.where(issue + LAUNCH_NS < until[rank], issue, _NONE_I64),
        "kernel_start_ns": start, "kernel_end_ns": end, "gpu_start_ns": start, "gpu_end_ns": end,
        "slowest_channel_ns": np.where(done, end - start, _NONE_I64),
        "channels_started": np.where(start >= 0, channels, 0), "channels_stopped": np.where(done, channels, 0),
        "communicator": communicator, "root": np.full(len(rank), _NONE_I32), "peer": peer,
        "num_channels": np.where(is_message, 1, CHANNELS), "slowest_channel": np.where(done, 0, _NONE_I32),
        "function": function[collectives["op"]], "dtype": dtype[collectives["dtype"]],
        "algorithm": np.where(is_message, 0, log.names("RING")),
        "protocol": np.where(is_message, 0, log.names("SIMPLE")),
        "rank": rank, "state": np.where(done, COMPLETE, OPEN),
    }  # fmt: skip
    return calls, _communicators(log, groups, until, is_closed=is_closed)


def nccl_queue_times(
    rank: Any, communicator: Any, op: Any, peer: Any, issue: Any, end: Any, until: Floats
) -> tuple[Any, Any]:
    """When kernels start and end: after the previous call of the group, or of the pair in one direction."""
    direction = np.where(peer >= 0, op, 0)
    order = np.lexsort((np.arange(len(rank)), peer, direction, communicator, rank))
    key = np.stack((rank, communicator, direction, peer))[:, order]
    follows = np.concatenate(([False], (key[:, 1:] == key[:, :-1]).all(axis=0)))
    ended = end[order]
    num_open = np.cumsum(ended < 0) - (ended < 0)
    is_behind = num_open > np.maximum.accumulate(np.where(follows, 0, num_open))
    ended = np.where(is_behind, _NONE_I64, ended)
    previous = np.where(follows, np.concatenate(([0], ended[:-1])), 0)
    began = np.maximum(issue[order] + SEEN_LATE_NS, previous)
    began = np.where(ended >= 0, np.minimum(began, ended), began)
    began = np.where((previous < 0) | (began >= until[rank[order]]), _NONE_I64, began)
    start, in_order = np.empty_like(began), np.empty_like(ended)
    start[order], in_order[order] = began, ended
    return start.astype(np.int64), in_order


def _communicators(log: Log, groups: list[str], until: Floats, *, is_closed: bool) -> Columns:
    layout, ranks = log.layout, np.arange(log.layout.num_ranks)
    nodes = layout.nodes()
    parts = []
    for number, dim in enumerate(groups):
        members = layout.members(dim)
        position, first, spread = (np.empty(len(ranks), np.int64) for _ in range(3))
        position[members] = np.arange(members.shape[1])[None, :]
        first[members] = members[:, :1]
        spread[members] = np.array([len(np.unique(nodes[group])) for group in members])[:, None]
        parts.append((np.full(len(ranks), number), first, np.full(len(ranks), members.shape[1]), position, spread))
    number, first, size, position, spread = (np.concatenate(column) for column in zip(*parts, strict=True))
    rank = np.tile(ranks, len(groups))
    order = np.lexsort((number, rank))
    ends = until[rank] if is_closed else np.full(len(rank), np.inf)
    columns: Columns = {
        "communicator": number, "comm_hash": (number + GROUPS_FIRST_ID) << 32 | first, "comm_name": np.zeros_like(rank),
        "num_ranks": size, "comm_rank": position, "num_nodes": spread,
        "interface_version": np.full(len(rank), INTERFACE_VERSION), "event_mask": np.full(len(rank), EVENT_MASK),
        "created_ns": np.zeros_like(rank),
        "finalized_ns": np.where(np.isfinite(ends), np.where(np.isfinite(ends), ends, 0), _NONE_I64).astype(np.int64),
        "rank": rank, "state": np.full(len(rank), COMPLETE if is_closed else OPEN),
    }  # fmt: skip
    return {name: np.asarray(values)[order] for name, values in columns.items()}
