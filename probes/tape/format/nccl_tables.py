"""The tables that the NCCL profiler plugin writes: communicators, calls, channels and links.

The plugin's C header `tape_layout.h` is generated from these (`python -m probes.collectives.nccl_plugin.layout`), so a
column has one definition for the writer in C, the reader in Python and the store.
"""

from __future__ import annotations

from .table import Table, bool_column, i32, i64, name, time

__all__ = ["NCCL_TABLES"]

NAMES_FILE = "nccl_names.jsonl"
_COMMUNICATOR = i32("communicator", "1", "number of the communicator in its process, from 0")

NCCL_TABLES = (
    Table(
        "nccl_communicators",
        "One NCCL communicator of one rank, from its initialisation to its end; open while it lives.",
        "tape",
        (
            _COMMUNICATOR,
            i64("comm_hash", "", "identifier of the communicator, the same on all its ranks"),
            name("comm_name", "name that the application gave it; NULL if none"),
            i32("num_ranks", "1", "ranks of the communicator; NULL before profiler interface v4"),
            i32("comm_rank", "1", "this rank within the communicator"),
            i32("num_nodes", "1", "nodes of the communicator; NULL before profiler interface v4"),
            i32("interface_version", "1", "version of the profiler interface that NCCL chose"),
            i32("event_mask", "", "NCCL event types that the plugin asked for, as a bit mask"),
            time("created_ns", "when the communicator was initialised"),
            time("finalized_ns", "when it was finalised or aborted; NULL while it lives"),
        ),
        can_be_open=True,
        segment_bytes=1 << 16,
        names_file=NAMES_FILE,
    ),
    Table(
        "nccl_calls",
        "One NCCL collective or point-to-point call of one rank: enqueued, launched, kernel started, kernel stopped.",
        "tape",
        (
            i64("call", "1", "number of the call in its process, from 0"),
            i64("seq", "1", "number in the communicator, from 0 (p2p calls count per peer and direction)"),
            i64("nccl_seq", "1", "NCCL's own number: per communicator and function; NULL for p2p"),
            i64("count", "1", "elements, as passed to NCCL"),
            time("enqueue_ns", "when NCCL began to enqueue the call"),
            time("launched_ns", "when the call was handed to the device; NULL until then"),
            time("kernel_start_ns", "when the host saw the first channel of the kernel start; NULL until then"),
            time("kernel_end_ns", "when the host saw the last channel stop; NULL until then or if not recorded"),
            i64("gpu_start_ns", "ns", "start of the first channel on the GPU's own timer, which has no known epoch"),
            i64("gpu_end_ns", "ns", "stop of the last channel so far on the GPU's own timer"),
            i64("slowest_channel_ns", "ns", "longest time of one channel between start and stop, on the GPU's timer"),
            i64("channels_started", "", "channels whose kernel started, as a bit mask"),
            i64("channels_stopped", "", "channels whose kernel stopped, as a bit mask"),
            _COMMUNICATOR,
            i32("root", "1", "root within the communicator, of broadcast and reduce; NULL for others"),
            i32("peer", "1", "rank at the other end within the communicator, of send and recv"),
            i32("num_channels", "1", "channels that NCCL planned; NULL if it did not say"),
            i32("slowest_channel", "1", "channel that took longest"),
            name("function", "NCCL's name of the operation: AllReduce, AllGather, ReduceScatter, Send, Recv, ..."),
            name("dtype", "NCCL's name of the element type"),
            name("algorithm", "NCCL's algorithm: RING, TREE, NVLS, ...; NULL for p2p"),
            name("protocol", "NCCL's protocol: LL, LL128, SIMPLE; CE for copies without a kernel; NULL for p2p"),
        ),
        can_be_open=True,
        segment_bytes=1 << 22,
        names_file=NAMES_FILE,
    ),
    Table(
        "nccl_channels",
        "One channel of the kernel of one NCCL call; recorded only where the events `channels` are asked for.",
        "tape",
        (
            i64("call", "1", "number of the call, as in nccl_calls"),
            time("start_ns", "when the host saw the channel start"),
            time("end_ns", "when the host saw it stop; NULL while it runs"),
            i64("gpu_start_ns", "ns", "start on the GPU's own timer"),
            i64("gpu_end_ns", "ns", "stop on the GPU's own timer"),
            _COMMUNICATOR,
            i32("channel", "1", "number of the channel"),
        ),
        can_be_open=True,
        segment_bytes=1 << 20,
        names_file=NAMES_FILE,
    ),
    Table(
        "nccl_links",
        "Network transfers of one rank with one peer over one channel in one direction, summed over some ten seconds; "
        "open records hold the sums so far and the operation in flight. Bytes, steps, waits need the events `steps`.",
        "tape",
        (
            time("start_ns", "start of the window"),
            time("progress_ns", "last time that anything moved on the link"),
            i64("num_ops", "1", "proxy operations that ended in the window"),
            i64("num_steps", "1", "network transfers that ended in the window"),
            i64("bytes", "By", "bytes that were transferred in the window"),
            i64("busy_ns", "ns", "total duration of the operations that ended"),
            i64("gpu_wait_ns", "ns", "part of all steps that waited for the GPU"),
            i64("peer_wait_ns", "ns", "part that waited for the receiver's credit"),
            i64("network_wait_ns", "ns", "part that waited for the network"),
            time("op_start_ns", "start of the operation in flight; NULL if there is none"),
            i64("op_call", "1", "call that the operation in flight belongs to; NULL if it is of another process"),
            i64("op_steps_done", "1", "steps of the operation in flight that ended"),
            i64("op_num_steps", "1", "steps of the operation in flight"),
            _COMMUNICATOR,
            i32("channel", "1", "number of the channel"),
            i32("peer", "1", "rank at the other end within the communicator"),
            bool_column("is_send", "whether this rank sends"),
        ),
        can_be_open=True,
        segment_bytes=1 << 19,
        names_file=NAMES_FILE,
    ),
)
