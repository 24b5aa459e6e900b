"""The kinds of events, described once: who writes them, their fields and what they mean.

    log.of(event_kinds.ROLLBACK)
    EVENT_KINDS["rollback"].fields            # the columns of its detail

A constant is the kind's stored name, so it can be used in SQL. Every event also has `wall_ns`, `mono_ns` (the monotonic
clock of its node), `attempt`, `rank` (-1: a node process), `kind`, `step` (or null). docs/schema.md is made from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .event_kind import EventKind
from .event_kind import bool_field as _bool
from .event_kind import float_field as _float
from .event_kind import int_field as _int
from .event_kind import json_field as _json
from .event_kind import ranks_field as _ranks
from .event_kind import text_field as _text
from .format.schema import TABLES, Column

__all__ = ["COMMON_FIELDS", "EVENT_KINDS", "EventKind", "unknown_fields"]


COMMON_FIELDS = ("wall_ns", "mono_ns", "attempt", "rank", "kind", "step")
"""Fields that every event has, besides the fields of its kind."""

_kinds: dict[str, EventKind] = {}
EVENT_KINDS: Mapping[str, EventKind] = MappingProxyType(_kinds)
"""All kinds by name, in the order of this file."""


def _kind(name: str, *fields: Column, by: str, meaning: str, table: str = "", is_open: bool = False) -> str:
    """Add a kind to the catalogue; returns its name."""
    if name in _kinds:
        raise ValueError(f"event kind {name} is described twice")
    fields = (*TABLES[table].columns, *fields) if table else fields
    _kinds[name] = EventKind(name=name, written_by=by, meaning=meaning, fields=fields, table=table, is_open=is_open)
    return name


def unknown_fields(kind: str, fields: Mapping[str, object]) -> list[str]:
    """Names among `fields` that the catalogue does not list for `kind`. Raises KeyError for an unknown kind."""
    described = EVENT_KINDS[kind]
    if described.is_open:
        return []
    known = {*COMMON_FIELDS, *(column.name for column in described.fields)}
    return [name for name in fields if name not in known]


_PID = _int("pid", "process id", unit="")
_NODE_RANK = _int("node_rank", "index of the node")
_EXIT_CODE = _int("exit_code", "of the process; negative: minus the signal")
_REASON = _text("reason", "one line")
_DEVICE = _text("device", "name of the device and its host")
_BATCH = _int("batch_index", "index of the global batch")
_LOSS = _float("loss", unit="nats")
_CODE = (_text("file", "of the program"), _int("line", "in it", unit=""), _text("function", "that is compiled"))
# fmt: off
# Laid out like a table: one entry per kind, with its fields in as few lines as possible.

_ERROR = (_text("type"), _text("message"), _text("traceback"), _text("package", "folder, of a program run as a module"))

# Identity of a rank.

RANK = _kind(
    "rank", table="ranks", by="rank, at its start and when its place in the mesh is known",
    meaning="Identity of a rank; the last one of an attempt counts.",
)
PROCESS_GROUP = _kind(
    "process_group", table="process_groups", by="rank, at the first call of a group",
    meaning="The rank is a member of a process group.",
)
RANK_CLOSED = _kind(
    "rank_closed", _json("probe_errors", "errors of the probes by place"), _json("dropped_records", "by table"),
    by="rank, as its last event", meaning="The rank ended cleanly and closed its tapes.",
)
NCCL_PLUGIN = _kind(
    "nccl_plugin",
    _text("state", "set, off, other_plugin, old_nccl, too_late, not_built; no_gpu for a program without Python"),
    _text("reason", "why it is not set, one line"),
    by="rank, before its process groups are made", meaning="Whether NCCL loads the profiler plugin.",
)
EXCEPTION = _kind("exception", *_ERROR, _text("phase", "that raised it, or empty"), by="rank, as it dies",
                  meaning="A Python exception ended the rank; SystemExit is an exit with a code or a text.")
THREAD_EXCEPTION = _kind("thread_exception", *_ERROR, _text("thread", "its name"), by="attached rank",
                         meaning="An exception ended a thread other than the loop's; the rank went on.")
MEMORY_SNAPSHOT = _kind(
    "memory_snapshot", _text("path", "in the run's folder"), _int("bytes", unit="By"), _int("device", "index on CUDA"),
    _int("reserved_bytes", unit="By"), _int("allocated_bytes", "of these, in tensors", unit="By"),
    _int("unused_bytes", "the rest, at the failure", unit="By"), _int("requested_bytes", unit="By"),
    _int("device_free_bytes", unit="By"), _text("asked_at", "line of the request, or empty"), _bool("has_stacks"),
    _json("sites", "memory in use by line: at, bytes, blocks"),
    _bool("is_at_failure", "taken when the allocation failed, not when the rank ended"),
    by="rank, as it dies", meaning="CUDA memory ran out, and a snapshot of it was written.",
)
FENCED = _kind(
    "fenced", _int("newest_attempt"),
    by="rank of an older attempt", meaning="The rank exits because a newer attempt has begun.",
)
GRAPH_REPLAYS = _kind(
    "graph_replays", _int("graph", "number of the graph in this process, from 1"), _int("replays", "so far"),
    by="rank, at the first replay of a CUDA graph and when its records are closed",
    meaning="A captured CUDA graph runs. It calls no hooks, so its phases are not recorded.",
)
FIRST_UPDATE = _kind("first_update", _int("num_before", "earlier updates, according to the optimizer's state, or null"),
                     by="attached rank, once", meaning="First update of the process.")
TRAINED_IN_TURN = _kind("trained_in_turn", by="attached rank, once",
                        meaning="Several optimizers step in turn, each after a backward pass.")
TRAINING_BEGAN = _kind("training_began", by="attached rank",
                       meaning="From this step on, a different model's optimizer marks the end of a step.")
MEMORY_PEAK = _kind(
    "memory_peak", _int("allocated_bytes", "largest so far", unit="By"), by="rank on a GPU, when it has grown by 1 %",
    meaning="Peak of the CUDA allocator's memory; less is in use between steps.",
)
ALLOCATION_RETRIES = _kind(
    "allocation_retries", _int("num_retries"),
    _int("allocated_bytes", "largest so far", unit="By"), _int("reserved_bytes", unit="By"),
    by="rank, at most once a second", meaning="The CUDA allocator found no memory, emptied its cache and tried again.",
)
SETTINGS = _kind(
    "settings", by="attached framework (Accelerate), on rank 0", is_open=True,
    meaning="Hyperparameters as passed to the framework, one field each.",
)
SAVED = _kind(
    "saved", _text("folder"),
    by="attached framework (Transformers)", meaning="The framework's trainer saved a checkpoint.",
)

# The training.

EVALUATION = _kind(
    "evaluation", _LOSS, _json("sets", "loss of each named validation set"),
    by="rank 0", meaning="Validation loss, mean over the validation sets.",
)
LOSS_SCALE = _kind(
    "loss_scale", _float("scale", "after it was halved"),
    by="rank 0", meaning="fp16 gradients overflowed: the step was dropped and the loss scale halved.",
)
RECOMPILE = _kind("recompile", *_CODE, _text("guard", "assumption that no longer holds"), by="rank",
                  meaning="A function was compiled again by torch.compile; `line` is its first line.")
GRAPH_BREAK = _kind("graph_break", *_CODE, _REASON, by="rank", meaning="A graph break of `torch.compile` at this line.")
FAULT_INJECTED = _kind(
    "fault_injected", _text("fault", "kind of fault"), _json("parameters"),
    by="rank", meaning="A drill injected a fault.",
)
CHECKPOINT = _kind(
    "checkpoint", table="checkpoints", by="rank 0; the launcher for remote ones",
    meaning="The state of a checkpoint changed.",
)
PEER_COPY = _kind(
    "peer_copy",
    _text("state", "complete, delayed (the previous copy was still being sent), failed"),
    _int("peer_rank"), _int("peer_node"), _int("bytes", unit="By"), _int("duration_ns", unit="ns"), _REASON,
    by="rank with a partner on another node, at the first copy and on each change",
    meaning="State of the copy that a rank keeps in another node's memory.",
)
RESUME_DIFFERS = _kind(
    "resume_differs", _json("parts", "that differ: parameters, optimizer, rng, data"),
    by="rank, after loading", meaning="The loaded state differs from the saved state.",
)
PREEMPTED = _kind(
    "preempted",
    _text("signal", "name, or null"), _int("checkpoint_step", "null if none was saved"),
    by="rank 0; also a rank that runs out of time", meaning="SIGTERM stopped the training.",
)
INTERRUPTED = _kind(
    "interrupted",
    _text("signal", "name"), _int("checkpoint_step", "null if none was saved"),
    by="rank 0", meaning="SIGINT stopped the training.",
)

# The guard.

NONFINITE = _kind(
    "nonfinite",
    _text("phase"), _json("parameters", "names of parameters with NaN or Inf"),
    _float("local_loss", unit="nats"), _int("local_nonfinite_count"),
    _bool("own_gradient_nonfinite", "before any reduction, or null"),
    by="every rank", meaning="A step with NaN or Inf was refused.",
)
REPLAY = _kind(
    "replay",
    _text("verdict", "non_finite, spike"),
    _text("state", "same: before the step; restored: the older state after the rollback"),
    _int("state_step"), _BATCH, _bool("came_back"), _LOSS,
    _float("loss_refused", unit="nats"), _float("loss_level", unit="nats"), _float("grad_norm"),
    _float("local_loss", unit="nats"),
    _json("origin", "null or module, operation, phase, how, microbatch, nonfinite_count, inputs, samples"),
    _json("samples", "worst samples: id, row, loss, file, byte, text"),
    _int("num_samples"), _int("data_rank"), _json("changed_samples"), _float("duration_s", unit="s"),
    by="every rank, for each replay", meaning="A refused step was recomputed.",
)
ROLLBACK = _kind(
    "rollback",
    _int("from_step"), _int("to_step"), _text("tier", "memory, disk, none"),
    _text("verdict", "non_finite, spike, corruption"), _REASON, _ranks("skipped_batches"),
    _ranks("replayed_batches", "trained on again, because the replay of the step was healthy"),
    _float("duration_s", unit="s"), _int("failures", "of this incident"), _float("rate_scale", "of the learning rate"),
    by="rank 0", meaning="The run went back to an earlier state.",
)
BATCH_SKIPPED = _kind("batch_skipped", _BATCH, _REASON, by="rank 0", meaning="A batch was skipped.")
RUN_STOPPED = _kind("run_stopped", _REASON, by="rank 0", meaning="The guard gave up.")
CORRUPTION = _kind(
    "corruption",
    _int("state_step"), _text("finding_kind"), _ranks("ranks"), _json("tensors"), _bool("certain"),
    _ranks("broken_ranks"), _json("devices"), _int("healthy_step", "last verified step"),
    by="rank 0", meaning="Fingerprints of the state differ.",
)
DEVICE_SUSPECTED = _kind(
    "device_suspected", _DEVICE, _int("suspect_rank"), _int("count", "so far on this device"),
    by="rank 0", meaning="State on a device changed between two optimizer steps, or differs from its replicas.",
)
GRADIENT_OUTLIER = _kind(
    "gradient_outlier",
    _int("outlier_rank"), _DEVICE, _BATCH, _float("peak"), _float("peak_again", "in the recomputation"),
    _float("ratio"), _float("sigmas"), _bool("came_back"), _int("count", "so far on this device"),
    by="rank 0", meaning="A step was recomputed because one rank's gradients were outliers.",
)

# Launcher.

RUN_STARTED = _kind(
    "run_started", _NODE_RANK, _int("nproc_per_node", "or null"), _int("max_restarts"), _int("launcher_pid", unit=""),
    by="launcher; attached: local rank 0", meaning="The run was launched or resumed on a node.",
)
RUN_ENDED = _kind(
    "run_ended",
    _NODE_RANK,
    _text("reason", "finished, preempted, interrupted, given_up, fenced, left_out, failed, launcher_lost"),
    _EXIT_CODE, _text("message"),
    by="launcher, or watch if the launcher was lost; attached: local rank 0, at a clean end or `detach`",
    meaning="The run ended on a node.",
)
ATTEMPT_STARTED = _kind(
    "attempt_started", _int("world_size"), _NODE_RANK, _int("ranks_left_over", "not used by the layout"),
    by="launcher or rank 0", meaning="The worker group was started.",
)
RANK_EXIT = _kind(
    "rank_exit",
    _int("exit_rank"), _PID, _EXIT_CODE, _text("signal", "name or null"),
    _text("out_of_memory", "which memory was exhausted, or null"), _text("message"),
    _bool("blamed", "counts against its device and node"),
    by="launcher", meaning="A rank's process ended by itself.",
)
RANK_STOPPED = _kind(
    "rank_stopped", _int("exit_rank"), _PID, _EXIT_CODE,
    by="launcher, or watch if it was lost", meaning="A rank was ended because others had died or all ranks restart.",
)
STOP_REQUESTED = _kind(
    "stop_requested", _NODE_RANK, _text("signal"),
    by="launcher", meaning="A signal asked the run to stop; open findings remain open.",
)
EXCLUDED = _kind(
    "excluded", _NODE_RANK, _text("device", "null for the whole node"), _int("excluded_rank"), _int("failures"),
    _text("cause", "straggler, xid, or null for failures"), _REASON,
    by="launcher", meaning="A device or node is excluded from the next attempt on.",
)
EXCLUSION_WITHHELD = _kind(
    "exclusion_withheld", _NODE_RANK, _ranks("ranks"), _bool("dry_run", "only `exclusion_dry_run` kept them"), _REASON,
    by="launcher, or watch if the cause is not the device", meaning="Reported ranks stay in the run.",
)

# The node process `watch`.

WATCH_STARTED = _kind("watch_started", _PID, by="watch", meaning="`watch` runs on the node.")
WATCH_STOPPED = _kind("watch_stopped", _PID, by="watch", meaning="`watch` ended cleanly.")
RANK_STATE = _kind(
    "rank_state",
    _int("state_rank"), _PID, _text("state", "running, stopped, dead"), _text("os_state", "letter of /proc"),
    by="watch, on a change", meaning="State of a rank's process.",
)
SILENT_WORK = _kind(
    "silent_work", _ranks("ranks", "at work"), _ranks("idle_ranks", "the others"),
    _float("cores", "in use, by children too"),
    by="watch, on a change and every 30 s of a silence", meaning="Ranks record nothing, but compute or read files.",
)
STACKS = _kind(
    "stacks",
    _text("path"), _ranks("ranks", "that wrote stacks"), _ranks("gil_ranks", "asleep in native code, holding the GIL"),
    by="watch", meaning="Python stacks of the ranks were taken.",
)
PROFILE_REQUESTED = _kind(
    "profile_requested",
    _int("request", "number of the request"), _ranks("ranks", "to profile: the suspect, then a peer"),
    _int("first_step"), _int("num_steps"), _text("finding_kind"), _REASON,
    by="watch", meaning="Ranks were asked to profile their next steps because of a finding.",
)
PROFILE_CAPTURED = _kind(
    "profile_captured",
    _text("path", "trace, in the run's folder; null if larger than the budget"), _int("bytes", unit="By"),
    _int("first_step"), _int("last_step"), _int("request", "number of the request, or null if scheduled"), _REASON,
    _json("removed", "older traces removed to keep the budget"),
    by="rank", meaning="Steps were recorded with torch's profiler.",
)
PROFILE_SUMMARY = _kind(
    "profile_summary",
    _int("capture_rank"), _text("path"), _int("first_step"), _int("last_step"), _int("request"), _REASON,
    _json("parts_ms", "means per step: step, compute, communication, exposed, copies, idle, data"),
    _json("operators", "by self time: name, phase, device, self_ms and calls per step"),
    _text("problem", "why the trace was not read completely"),
    by="watch, once per trace", meaning="Summary of a trace.",
)
SLOW_LINE = _kind(
    "slow_line",
    _int("slow_rank"), _int("peer_rank"), _text("line", "file:line function"),
    _float("share_ratio", "share of the slow rank's samples at this line"),
    _float("peer_share_ratio", "share of the peer's"), _int("num_samples"),
    by="watch, while a straggler is open", meaning="The line at which a slow rank is sampled most often.",
)
RECORDER_DUMPS = _kind(
    "recorder_dumps", _text("path"), _ranks("ranks", "that wrote a dump"),
    by="watch, before it kills", meaning="Dumps of torch's flight recorder were taken, for `rankscope analyze`.",
)
CULPRIT_KILLED = _kind(
    "culprit_killed", _int("killed_rank"), _PID, _REASON,
    by="watch", meaning="The culprit of a hang was killed.",
)
EXCLUSION_REQUESTED = _kind(
    "exclusion_requested", _NODE_RANK, _ranks("ranks"), _text("mode", "exclude, replace"),
    _text("cause", "straggler, xid"), _bool("dry_run"), _REASON,
    by="watch", meaning="The launcher of a node was asked to exclude ranks.",
)
VERDICT_REFUSED = _kind(
    "verdict_refused", _ranks("ranks", "that the verdict blames"), _float("quiet_s", "since the last record", unit="s"),
    by="watch of a node other than 0", meaning="Node 0 reported a hang while the ranks of this node kept recording.",
)
MESSAGE_REFUSED = _kind(
    "message_refused", _int("node_rank", "claimed sender"),
    _text("purpose", "digest, verdict, leader, clock"), _REASON, _int("num_messages", "since the last such event"),
    by="watch, each reason once a minute", meaning="Messages between `watch` processes were forged or replayed.",
)
DIGESTS_UNSIGNED = _kind(
    "digests_unsigned", _NODE_RANK,
    by="watch, with several nodes", meaning="The job has no secret: digests and verdicts are not signed.",
)
WATCH_REPLACED = _kind(
    "watch_replaced", _PID, _REASON, by="launcher, or the parent of `watch` under another launcher",
    meaning="`watch` had stopped answering or ended, and was started again.",
)
LAUNCHER_LOST = _kind(
    "launcher_lost", _NODE_RANK, _PID, _ranks("ranks", "of the attempt on this node"),
    by="watch", meaning="The launcher of a node ended without recording its end; its ranks end too.",
)
RECORDS_RETIRED = _kind(
    "records_retired", _float("window_s", "kept", unit="s"), _int("segments", "tape segments removed so far"),
    _int("used_bytes", "tapes and store of the node", unit="By"),
    _int("budget_bytes", "for the time recorded so far, or null", unit="By"),
    by="watch, first and when the window changes", meaning="Ingested tapes and calls before the window were removed.",
)
BUDGET_EXCEEDED = _kind(
    "budget_exceeded", _int("used_bytes", "tapes and store of the node", unit="By"), _int("budget_bytes", unit="By"),
    by="watch, once", meaning="Records need more than their budget although no window is left to shorten.",
)
PUBLISHED = _kind("published", _text("address"), by="watch", meaning="Records are at the configured address (again).")
PUBLISH_FAILED = _kind("publish_failed", _text("address"), _REASON, by="watch", meaning="Publishing records failed.")
STALE_KILLED = _kind("stale_killed", _int("killed_rank"), _PID, _int("killed_attempt"), by="watch",
                     meaning="A rank of an older attempt was killed.")
NODE_SILENT = _kind(
    "node_silent", _NODE_RANK, _float("silent_s", unit="s"), _ranks("ranks"), _bool("never_heard"),
    by="watch of node 0", meaning="A node's digests stopped arriving.",
)
NODE_HEARD = _kind("node_heard", _NODE_RANK, by="watch of node 0", meaning="A silent node's digests arrive again.")
CLOCK_OFFSET = _kind(
    "clock_offset", _NODE_RANK, _int("offset_ns", "ahead of node 0", unit="ns"), _int("error_ns", "largest", unit="ns"),
    by="watch of node 0, first and at each change by 5 ms", meaning="Offset of a node's clock.",
)
XID = _kind(
    "xid", _int("xid"), _text("device", "NVML UUID"), _text("node"), _text("message"),
    by="watch", meaning="The driver reported a GPU error.",
)
HEALTH_FAILED = _kind(
    "health_failed", _text("source", "host, NVML, DCGM, XID, tape"), _REASON,
    by="watch, on a change", meaning="A source of health readings failed.",
)
METRICS_SERVED = _kind("metrics_served", _text("url"), by="watch", meaning="Prometheus metrics are served.")
METRICS_REFUSED = _kind("metrics_refused", _REASON, by="watch", meaning="Prometheus metrics could not be served.")
OTEL_STARTED = _kind("otel_started", _text("group"), _ranks("ranks"), by="watch", meaning="OpenTelemetry export began.")
OTEL_REFUSED = _kind("otel_refused", _REASON, by="watch", meaning="Export to OpenTelemetry could not begin.")
OTEL_STOPPED = _kind("otel_stopped", _int("sent", "batches"), _int("dropped"), by="watch", meaning="OTLP export ended.")
TRACKER_STARTED = _kind(
    "tracker_started", _text("tracker", "tensorboard, wandb"), _PID, by="watch", meaning="A tracker's process began."
)
TRACKER_FINISHED = _kind("tracker_finished", _text("tracker"), by="watch", meaning="A tracker's process ended cleanly.")
TRACKER_FAILED = _kind(
    "tracker_failed", _text("tracker"), _REASON,
    by="watch", meaning="A tracker's process died, could not write, or did not end in time.",
)
HOOK_FAILED = _kind("hook_failed", _text("hook"), _REASON, by="watch", meaning="Sending a finding failed.")
ANALYZER_FAILED = _kind("analyzer_failed", _text("analyzer"), _REASON, by="watch", meaning="A check or plug-in failed.")
FINDING = _kind(
    "finding", _text("id", "the same live and post-mortem"), _float("cost_s", "wall time lost", unit="s"),
    table="findings", by="watch", meaning="A live analyzer reported a finding.",
)
ADVICE = _kind(
    "advice", _text("finding_kind"), _text("cause"), _text("summary"), _text("next", "what to do"),
    by="watch", meaning="Advice from the first steps; nothing is broken.",
)
