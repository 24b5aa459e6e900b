"""The tables of Rankscope, described once.

The record layouts of the tapes (`probes.tape.format.writer`), the DDL of the store (`store`) and `docs/schema.md` are
generated from here, so that a column has one name, one unit and one meaning everywhere.

    >>> TABLES["steps"].column("duration_ns").unit
    'ns'

Conventions: times are nanoseconds since the Unix epoch. On a tape they are of the monotonic clock, and ingestion
converts them with the clock anchor in the tape's header. Durations end in `_ns`. A value that was not recorded is NULL
in the store, and on a tape the sentinel of its type (`UNSET`), never 0.
"""

from __future__ import annotations

from . import table as make
from .nccl_tables import NCCL_TABLES
from .table import UNSET, UNSET_F64_BITS, Column, ColumnType, Source, Table

__all__ = [
    "SCHEMA_VERSION",
    "TABLES",
    "UNSET",
    "UNSET_F64_BITS",
    "Column",
    "ColumnType",
    "Source",
    "Table",
]

SCHEMA_VERSION = 1
"""Raised when readers of the previous version would misread a tape or a store."""

_i64, _i32, _f64, _name, _text, _time = make.i64, make.i32, make.f64, make.name, make.text, make.time

_STEP = _i64("step", "1", "training step, from 1; it runs again with the same number after a rollback")

_TAPE_TABLES = (
    Table(
        "steps",
        "One training step of one rank: its duration, how the time was spent, and its results.",
        "tape",
        (
            _STEP,
            _time("start_ns", "when the step began"),
            _i64("duration_ns", "ns", "wall time of the step (on the GPU if stamped); NULL while it runs"),
            _i64("data_ns", "ns", "waiting for and preparing input"),
            _i64("forward_ns", "ns", "forward passes, waits for collectives included"),
            _i64("backward_ns", "ns", "backward passes, waits for collectives included"),
            _i64("optimizer_ns", "ns", "clipping, verdict and optimizer, waits for collectives included"),
            _i64("checkpoint_ns", "ns", "training stopped for a checkpoint"),
            _i64("evaluate_ns", "ns", "evaluation inside the step"),
            _i64("data_wait_ns", "ns", "part of data_ns blocked in collectives"),
            _i64("forward_wait_ns", "ns", "part of forward_ns blocked in collectives"),
            _i64("backward_wait_ns", "ns", "part of backward_ns blocked in collectives"),
            _i64("optimizer_wait_ns", "ns", "part of optimizer_ns blocked in collectives"),
            _i64("before_forward_ns", "ns", "between phases, before data or a forward pass; NULL without known phases"),
            _i64("forward_to_backward_ns", "ns", "between phases, before a backward pass"),
            _i64("backward_to_optimizer_ns", "ns", "between phases, before the optimizer"),
            _i64("after_optimizer_ns", "ns", "between phases, before evaluation, a checkpoint or the step's end"),
            _i64("before_forward_wait_ns", "ns", "part of before_forward_ns blocked in collectives"),
            _i64("forward_to_backward_wait_ns", "ns", "part of forward_to_backward_ns blocked in collectives"),
            _i64("backward_to_optimizer_wait_ns", "ns", "part of backward_to_optimizer_ns blocked in collectives"),
            _i64("after_optimizer_wait_ns", "ns", "part of after_optimizer_ns blocked in collectives"),
            _i64("collective_wait_ns", "ns", "blocked in collectives, over the whole step"),
            _i64("data_late_ns", "ns", "part of data_ns: GPU waiting for its host; NULL on a CPU"),
            _i64("forward_late_ns", "ns", "part of forward_ns: GPU waiting for its host"),
            _i64("backward_late_ns", "ns", "part of backward_ns: GPU waiting for its host"),
            _i64("optimizer_late_ns", "ns", "part of optimizer_ns: GPU waiting for its host"),
            _i64("before_forward_late_ns", "ns", "part of before_forward_ns: GPU waiting for its host"),
            _i64("forward_to_backward_late_ns", "ns", "part of forward_to_backward_ns: GPU waiting for its host"),
            _i64("backward_to_optimizer_late_ns", "ns", "part of backward_to_optimizer_ns: GPU waiting for its host"),
            _i64("after_optimizer_late_ns", "ns", "part of after_optimizer_ns: GPU waiting for its host"),
            _i64("stamped_steps", "1", "steps that this row's GPU times represent; 0: other rows do; NULL: no stamps"),
            _i64("cpu_ns", "ns", "CPU time of the process in the step, all threads"),
            _i64("gc_ns", "ns", "inside Python's garbage collector"),
            _i64("run_delay_ns", "ns", "the step's thread was ready to run and waited for a core; NULL if not known"),
            _i64("major_faults", "1", "pages of the process that had to be read from a disk"),
            _i64("tokens", "1", "tokens that this rank trained on"),
            _i64("batch_index", "1", "global index of the batch in the data stream"),
            _f64("loss", "nat", "mean loss over the global batch"),
            _f64("local_loss", "nat", "mean loss over this rank's part of the batch"),
            _f64("grad_norm", "1", "global gradient norm before clipping"),
            _f64("local_grad_norm", "1", "norm of this rank's own gradient before it was reduced; NULL if not taken"),
            _f64("lr", "1", "learning rate of the step"),
            _f64("compression_error", "1", "relative L2 error of the reduced gradient due to compression, if measured"),
            _i64("memory_bytes", "By", "resident memory of the process, or allocated on the device"),
            _i64("nonfinite_count", "1", "NaN and Inf among this rank's gradients; NULL if not counted"),
            Column("committed", "bool", "", "whether the optimizer step was taken"),
        ),
        can_be_open=True,
        segment_bytes=1 << 18,
    ),
    Table(
        "spans",
        "A named part of a step: data, forward, backward, optimizer, checkpoint, evaluate, or a phase of the script.",
        "tape",
        (
            _STEP,
            _i32("microbatch", "1", "index of the microbatch, NULL where there is none"),
            _i32("stage", "1", "global index of the pipeline stage, NULL without a pipeline"),
            _name("kind", "forward, loss, backward, weight, reduce, send, recv, data, optimizer, checkpoint, ..."),
            _time("start_ns", "start"),
            _time("end_ns", "end; NULL while it runs"),
            _i64("wait_ns", "ns", "time blocked in collectives"),
        ),
        can_be_open=True,
    ),
    Table(
        "collectives",
        "One collective or point-to-point call of one rank, written before the call and completed in place.",
        "tape",
        (
            _STEP,
            _i64("seq", "1", "number of the call within its group, from 0 (p2p calls count per peer and direction)"),
            _i64("bytes", "By", "size of this rank's input (for a gathering receiver: of its output)"),
            _time("issue_ns", "when the call was made"),
            _time("end_ns", "when it was complete; NULL while it is in flight"),
            _i64("wait_ns", "ns", "how long the caller's thread was blocked by it"),
            _name("process_group", "label of the process group, the same on all its ranks: dimension and ranks"),
            _name("op", "all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, barrier, send, recv, ..."),
            _name("dtype", "element type, torch's name without the prefix"),
            _name("shape", "shape of the input, as 128x64"),
            _name("phase", "kind of the span in which the call was made"),
            _name("caller", "file:line function that made the call, outside torch"),
            _i32("peer", "1", "global rank at the other end of a send or recv"),
            Column("is_async", "bool", "", "whether the caller went on without waiting"),
            Column("nonfinite", "bool", "", "whether this rank's input held NaN or Inf before the call"),
        ),
        can_be_open=True,
        segment_bytes=1 << 21,
    ),
    Table(
        "device_stalls",
        "An interval in which a GPU's compute stream was idle, measured by events on it, on the host's clock.",
        "tape",
        (
            _STEP,
            _time("start_ns", "start"),
            _time("end_ns", "end"),
            _name("place", "phase, or gap between phases"),
            _name("waits_for", "communication, or host (no more work was enqueued)"),
        ),
        segment_bytes=1 << 18,
    ),
    Table(
        "gradients",
        "One parameter's gradient on one rank, at an interval or when a step went wrong.",
        "tape",
        (
            _STEP,
            _name("parameter", "fully qualified name of the parameter"),
            _f64("norm", "1", "L2 norm of the local gradient (of the local shard if sharded)"),
            _f64("max_abs", "1", "largest absolute value"),
            _i64("nonfinite_count", "1", "number of NaN and Inf elements"),
        ),
    ),
    Table(
        "scalars",
        "Values that the script logged under any name: `rankscope.log(accuracy=0.5)`.",
        "tape",
        (
            _STEP,
            _name("name", "name under which it was logged"),
            _f64("value", "", "the number; NaN and Inf as they are"),
        ),
    ),
    Table(
        "experts",
        "Choices of a mixture-of-experts router for one rank's tokens, since that rank's previous rows.",
        "tape",
        (
            _STEP,
            _i64("tokens", "1", "times that the expert was chosen for a token"),
            _i64("dropped", "1", "choices above the expert's capacity"),
            _i32("layer", "1", "number of the block"),
            _i32("expert", "1", "number of the expert in its layer"),
        ),
    ),
    Table(
        "fingerprints",
        "A checksum of parameters and optimizer state. It is equal on all ranks of a replica group, and constant "
        "between two optimizer steps. One row covers all tensors of a group; tensors that differ have a row each.",
        "tape",
        (
            _STEP,
            _time("taken_ns", "when it was taken: before the optimizer's step that follows `step`"),
            _name("replica_group", "label of the ranks that must agree; shard:<rank> where no other rank holds it"),
            _name("tensor", "model.<parameter> or optimizer.<parameter>.<state>; (all): all tensors of the group"),
            _i64("hash", "", "64-bit checksum of the bytes"),
            _i64("expected_hash", "", "checksum right after the previous optimizer step; NULL if it was not taken"),
        ),
    ),
)

_EVENT_TABLES = (
    Table(
        "ranks",
        "Identity of a rank: process, host, device, place in the mesh. The last row of an (attempt, rank) counts.",
        "event",
        (
            _i32("world_size", "1", "ranks of the attempt"),
            _i32("local_rank", "1", "rank within the node"),
            _i32("node_rank", "1", "index of the node"),
            _text("host", "host name"),
            _i64("pid", "", "process id on the host"),
            _i64(
                "start_ticks",
                "",
                "start of the process in clock ticks since boot; with the pid, it identifies the process",
            ),
            _text("device", "cpu or cuda:0"),
            _text("device_uuid", "NVML UUID of the device"),
            _i32("pp", "1", "coordinate in this dimension of the mesh"),
            _i32("dp_replicate", "1", "coordinate in this dimension of the mesh"),
            _i32("dp_shard", "1", "coordinate in this dimension of the mesh"),
            _i32("cp", "1", "coordinate in this dimension of the mesh"),
            _i32("tp", "1", "coordinate in this dimension of the mesh"),
            _i32("ep", "1", "coordinate in this dimension of the mesh"),
            _i64("clock_offset_ns", "ns", "epoch time minus monotonic time when the rank started"),
        ),
        event_kind="rank",
    ),
    Table(
        "process_groups",
        "The process groups that a rank is a member of.",
        "event",
        (
            _text("process_group", "label, as in collectives.process_group"),
            _text("description", "torch's description of the group, e.g. mesh_tp"),
            _text("group_name", "torch's name of the group, as in NCCL's communicator if torch passes it to NCCL"),
            _text("recorded_by", "source of its calls: wrapper (also if NULL), nccl_plugin, flight_recorder, nothing"),
            Column("members", "list_i64", "1", "global ranks of the members, in order"),
        ),
        event_kind="process_group",
    ),
    Table(
        "checkpoints",
        "A change of state of a checkpoint.",
        "event",
        (
            _text("tier", "memory, disk or remote"),
            _text(
                "state",
                "writing, complete, verified, good, condemned, failed, removed; also loaded, delayed",
            ),
            _text("path", "folder, relative to the run; for remote checkpoints the run's address"),
            _i64("bytes", "By", "size over all shards; for remote checkpoints the bytes sent"),
            _i64("duration_ns", "ns", "time until this state"),
            _i64("stall_ns", "ns", "time for which training was stalled"),
            _text("reason", "why it was condemned, refused or removed"),
        ),
        event_kind="checkpoint",
    ),
    Table(
        "findings",
        "Findings of the live analyzers, as `watch` and the ranks wrote them.",
        "event",
        (
            _text("analyzer", "name of the analyzer"),
            _text("finding_kind", "kind of finding, see the runbook"),
            _text("severity", "critical, warning, info"),
            _text("status", "fired, suspect, advice, ok, insufficient_data"),
            Column("finding_ranks", "list_i64", "1", "ranks concerned"),
            _i64("first_step", "1", "first step concerned"),
            _i64("last_step", "1", "last step concerned"),
            _text("cause", "cause within the kind"),
            _text("summary", "one sentence"),
            Column("evidence", "json", "", "values by name"),
            _text("advice", "anchor in the runbook"),
        ),
        event_kind="finding",
    ),
)

_HEALTH = Table(
    "health",
    "One reading of a device or host, about once a second; NULL if not supported. Disk columns, and those from "
    "`num_cpus` on, are of hosts only.",
    "tape",
    (
        _time("sample_ns", "when it was read"),
        _name("node", "host name"),
        _name("device", "NVML UUID of a GPU, or `host`"),
        _f64("cpu_utilization_ratio", "1", "busy share of the host's CPUs"),
        _f64("load_1m", "1", "runnable processes, one-minute average"),
        _i64("memory_used_bytes", "By", "memory in use on the device or host"),
        _i64("memory_total_bytes", "By", "memory of the device or host"),
        _i64("disk_free_bytes", "By", "free space where the run is written"),
        _f64("gpu_utilization_ratio", "1", "share of time in which any kernel ran"),
        _f64("temperature_celsius", "Cel", "GPU core temperature"),
        _f64("power_watts", "W", "power draw"),
        _f64("energy_joules", "J", "energy used since the driver was loaded"),
        _f64("sm_clock_hertz", "Hz", "clock of the multiprocessors"),
        _f64("sm_active_ratio", "1", "share of time in which multiprocessors had work (Hopper, or DCGM)"),
        _f64("tensor_active_ratio", "1", "share of time in which tensor cores worked (Hopper, or DCGM)"),
        _f64("memory_bandwidth_ratio", "1", "share of the memory's bandwidth that was used (Hopper, or DCGM)"),
        _i64("throttle_reasons", "", "NVML bit mask of clock event reasons"),
        _i64("ecc_corrected_total", "1", "corrected memory errors since the driver was loaded"),
        _i64("ecc_uncorrected_total", "1", "uncorrected memory errors since the driver was loaded"),
        _i64("remapped_rows_total", "1", "rows of the device's memory that were remapped"),
        Column("remap_pending", "bool", "", "whether a remapping waits for the device's next reset"),
        Column("remap_failed", "bool", "", "whether a row could not be remapped"),
        _i64("pcie_replay_total", "1", "packets replayed on PCIe since the driver was loaded"),
        _i64("nvlink_errors_total", "1", "replays, recoveries, CRC errors of all NVLinks since the driver was loaded"),
        _i64("num_cpus", "1", "CPUs that the host's processes may use"),
        _i64("swapped_pages_total", "1", "pages swapped in or out since the host was booted"),
        _i64("network_errors_total", "1", "errors and drops of all interfaces since they were up"),
        _i64("tcp_segments_total", "1", "TCP segments sent since the host was booted"),
        _i64("tcp_retransmits_total", "1", "TCP segments retransmitted since the host was booted"),
        _f64("cpu_pressure_ratio", "1", "share of 10 s in which some process waited for a core"),
        _f64("memory_pressure_ratio", "1", "share of 10 s in which some process waited for memory"),
        _f64("io_pressure_ratio", "1", "share of 10 s in which some process waited for a disk"),
        _f64("disk_read_latency_seconds", "s", "mean time of a read since the previous reading, slowest disk"),
        _f64("disk_write_latency_seconds", "s", "mean time of a write with its wait in the queue, likewise"),
        _f64("cgroup_throttled_seconds_total", "s", "time in which the cgroup's CPU limit stopped its processes"),
        _i64("infiniband_errors_total", "1", "errors of all InfiniBand and RoCE ports since they were up"),
        _i64("infiniband_downs_total", "1", "times that an InfiniBand or RoCE port lost or recovered its link"),
        _i64("infiniband_congestion_total", "1", "congestion notifications that these ports received"),
    ),
)

_EVENTS = Table(
    "events",
    "Rare occurrences with details: checkpoint, rollback, restart, stacks, injected fault, finding.",
    "watch",
    (
        _time("wall_ns", "when it happened"),
        _STEP,
        _text("kind", "kind of event"),
        Column("detail", "json", "", "the whole event, as written"),
    ),
)

_LOG_EVENTS = Table(
    "log_events",
    "Lines of text logs that match a rule of `store/readers/logs`; filled by `rankscope analyze` from files.",
    "reader",
    (
        _time("wall_ns", "time on the line, UTC unless the line names a zone; NULL if it has none"),
        _i64("step", "1", "training step on the line, NULL if it names none"),
        _text("host", "host name on the line or in the file's name"),
        _i64("pid", "", "process id on the line"),
        _text("source", "file, relative to the given folder"),
        _i64("line", "1", "number of the line in its file, from 1"),
        _text("kind", "name of the rule that matched"),
        _text("message", "the line without its prefix, shortened"),
        Column("fields", "json", "", "values that the rule extracted from the line"),
    ),
)

_NCCL_GROUPS = Table(
    "nccl_groups",
    "The process group of a rank's NCCL communicator, matched at ingestion by name, members and order.",
    "derived",
    (
        _time("created_ns", "when the communicator was initialised"),
        _i32("communicator", "1", "number of the communicator in its process, as in nccl_calls and nccl_links"),
        _text("process_group", "label, as in collectives.process_group: mesh dimension and ranks"),
        Column("members", "list_i64", "1", "global ranks by their place in the communicator; empty if not known"),
        Column("is_alive", "bool", "", "whether it has not been finalised or aborted"),
    ),
)

_COLLECTIVE_TOTALS = Table(
    "collective_totals",
    "Sums of the calls of one rank, step, group and operation that retention has removed from `collectives`.",
    "derived",
    (
        _STEP,
        _text("process_group", "label of the process group, as in collectives"),
        _text("op", "operation, as in collectives"),
        _text("phase", "kind of the span in which the calls were made"),
        _i64("calls", "1", "number of calls"),
        _i64("bytes", "By", "sum of their sizes"),
        _i64("duration_ns", "ns", "sum of their times from issue to end"),
        _i64("wait_ns", "ns", "sum of the times for which the caller's thread was blocked"),
    ),
)

_ALL_TABLES = (
    *_TAPE_TABLES,
    _COLLECTIVE_TOTALS,
    *NCCL_TABLES,
    _NCCL_GROUPS,
    _HEALTH,
    *_EVENT_TABLES,
    _EVENTS,
    _LOG_EVENTS,
)
TABLES: dict[str, Table] = {table.name: table for table in _ALL_TABLES}
"""Every table by name. In the store each table also has `attempt` (start of the worker group, from 0) and `rank` (-1:
none); tables from events also have `wall_ns` and `step`."""
