"""Labels and units of evidence.

    label_of("cpu_time_excess_ms")          # "extra CPU time per step"
    shown("headroom_bytes", 12_884_901_888)     # "12 GiB"

A name without an entry becomes its own label: with spaces, without its unit and `num_`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from analyzers.wording import (
    group_text,
    is_number,
    listed,
    number,
    percent,
    ranks_text,
    rate_text,
    rise_text,
    size_text,
)

__all__ = ["label_of", "shown"]

DIGITS = 4
"""Significant digits of a number; further digits differ between two equal runs."""

_LABELS = {
    "age_steps": "age of the checkpoint",
    "whatif_withheld": "no prediction, because",
    "agreeing_steps_ratio": "steps slower than peers",
    "allocated_bytes": "given to tensors",
    "arrives_last_ratio": "arrived last in",
    "asked_at": "asked for by",
    "transfer_at_best_ms": "at the best bandwidth",
    "batch_index": "batch",
    "batch_indices": "batches",
    "best_gb_per_s": "best bandwidth seen",
    "latency_ratio": "latency in transfers",
    "best_process_group": "fastest group",
    "bus_gb_per_s": "bandwidth",
    "bytes": "bytes of the call",
    "caller": "called at",
    "caused_wait_ratio": "peers' waiting it caused",
    "certain_at_step": "certain from step",
    "chain_broken_ranks": "changed on",
    "is_reproduced": "reproduced on replay",
    "is_reproduced_when_restored": "also from an older state",
    "core_wait_excess_ms": "extra wait for a core",
    "count": "number of times",
    "count_on_device": "times on this device",
    "cpu_time_excess_ms": "extra CPU time per step",
    "cycle": "waiting for each other",
    "data_highest_ms": "longest wait for data",
    "data_ms": "wait for data per step",
    "data_ratio": "waiting for data",
    "device_bytes": "size of the device",
    "device_free_bytes": "left on the device",
    "disk_free_bytes": "free on its disk",
    "disk_free_lowest_bytes": "least free so far",
    "dropped_ratio": "expert choices dropped",
    "every_steps": "repeats every",
    "excess_ms": "slower per step by",
    "factor_ratio": "slowdown factor",
    "first_to_report_rank": "first to report it",
    "gc_excess_ms": "extra garbage collection",
    "slow_step_ms": "slow step",
    "grad_norm": "gradient norm",
    "recovered_step": "recovered by step",
    "loss_after": "loss at the end",
    "grad_norm_rise_ratio": "rise of gradient norm",
    "grad_norm_z": "gradient norm, deviation",
    "growing_ranks": "memory grows on",
    "growth_per_step_bytes": "growth per step",
    "highest_bytes": "most in use",
    "highest_of_peers_bytes": "most of its peers",
    "host_only": "what devices ran",
    "host_load_per_cpu": "host load per CPU",
    "host_excess_ms": "host takes longer by",
    "interval_steps": "steps between saves",
    "largest_allocations": "largest in use",
    "largest_site": "most was allocated by",
    "last_completed": "last finished call",
    "late_side": "late side",
    "lines": "log line",
    "headroom_bytes": "left until full",
    "limit_s": "hang threshold",
    "load_median": "runnable processes",
    "load_ratio": "load over an even share",
    "lost_s": "lost by one failure",
    "lr": "learning rate",
    "major_faults_excess": "extra page faults (disk)",
    "memory_first_bytes": "memory at the start",
    "memory_last_bytes": "memory at the end",
    "memory_snapshot": "memory snapshot",
    "named_phase": "in its phase",
    "newest_bytes": "in use at the end",
    "node_rank": "node",
    "noise_ratio": "step-to-step noise",
    "norm_of_others": "gradient norm elsewhere",
    "norm_of_start": "largest norm at start",
    "num_blocks": "blocks concerned",
    "num_blocks_of_model": "blocks of the model",
    "num_checked_inputs": "inputs checked",
    "num_cpus": "CPUs",
    "num_failed": "failed saves",
    "num_flagged_inputs": "inputs with NaN or Inf",
    "num_good_since": "good saves since",
    "num_nonfinite_parameters": "non-finite parameters",
    "num_places": "devices or hosts",
    "num_retries": "retries",
    "num_seconds_with_retries": "seconds with retries",
    "num_steps": "steps affected",
    "num_tensors": "tensors that differ",
    "ongoing": "continues at the end",
    "odd_pids": "suspected processes",
    "op": "collective",
    "origin_module": "first bad output of",
    "origin_operation": "in operation",
    "origin_ranks": "began on",
    "peak": "largest gradient value",
    "peak_again": "the same, recomputed",
    "peers_wait_more_ms": "peers wait longer by",
    "per_block_factor_ratio": "factor per block",
    "place": "where in the step",
    "ranks_with_nonfinite_local_loss": "loss not finite on",
    "ranks_without_dump": "no dump from",
    "ratio": "value / expected value",
    "readings": "readings under load",
    "reason_bit": "NVML reason bit",
    "replayed_batches": "batches kept",
    "replay_error_ratio": "prediction error",
    "replayed_first_step": "simulated from step",
    "replayed_last_step": "simulated to step",
    "reported_by_ranks": "reported by",
    "others_bytes": "held by other processes",
    "own_bytes": "held by this process",
    "recorded_bytes": "in tensors of the ranks",
    "requested_bytes": "asked for",
    "reserved_bytes": "reserved by torch",
    "rise_factor_ratio": "rise over the start",
    "rise_z": "rise over the noise",
    "run_s": "total step time",
    "run_without_it_s": "total without it",
    "seq": "sequence number",
    "sigmas": "distance from peers",
    "silent_s": "silent for",
    "snapshot_rank": "snapshot of rank",
    "speedup_without_it_ratio": "speed-up without it",
    "stall_ms": "training stalled by save",
    "stall_ratio": "time stalled in saves",
    "starved_steps": "steps that waited",
    "step_ms": "step time",
    "step_without_it_ms": "step time without it",
    "steps": "steps judged",
    "steps_slow": "slow steps",
    "steps_to_out_of_memory": "steps until memory full",
    "terminated_ranks": "ended by the launcher",
    "throttled_ratio": "time throttled",
    "time_to_out_of_memory_s": "time until then",
    "time_until_full_s": "full in",
    "timed_out_ranks": "timed out",
    "tokens_excess_ratio": "more tokens than peers",
    "total_bytes": "capacity",
    "step_executions": "executions of the step",
    "unused_bytes": "cached and unused",
    "xids": "XID of the device",
    "device_step": "step of the device",
    "used_ratio": "share in use",
    "victims": "ended because of it",
    "waiting_for_late_ratio": "waiting for stragglers",
    "waiting_calls": "calls they are in",
    "waiting_ranks": "waited",
    "waiting_ratio": "time with CPU queue",
    "work_ms_by_coordinate": "work by stage",
    "xid": "XID",
}
_VALUES = {
    "pattern": {
        "chronic": "since the start",
        "since": "every step since onset",
        "transient": "temporary",
        "intermittent": "intermittent",
        "pauses": "occasional pauses",
        "rotating": "rotating over ranks",
    },
    "replay_verdict": {"data_or_numerics": "data or numerics"},
    "place": {
        "before_forward": "before the forward pass",
        "forward_to_backward": "forward to backward",
        "backward_to_optimizer": "backward to optimizer",
        "after_optimizer": "after the optimizer",
    },
}
_UNITS = {
    "_gb_per_s": "",  # the label has no unit, because `shown` writes it behind the value
    "_ms": " ms",
    "_s": " s",
    "_z": " sigma",
    "_celsius": " °C",
    "_tokens": " tokens",
    "_steps": " steps",
}
_WITHOUT_UNIT = ("starved_steps", "open_steps", "num_steps")  # counts: the label says what is counted


_ONE_RANK = ("first_to_report_rank", "link_rank", "readings_of_rank")


def label_of(name: str) -> str:
    """The label of a value."""
    if name in _LABELS:
        return _LABELS[name]
    for suffix in ("_ratio", "_bytes", "_hertz", *_UNITS):
        if name.endswith(suffix) and name not in _WITHOUT_UNIT:
            name = name.removesuffix(suffix) + (" deviation" if suffix == "_z" else "")
            break
    return name.removeprefix("num_").replace("_", " ")


def shown(name: str, value: Any) -> str:
    """The value with its unit and as many digits as people compare; a long list is shortened."""
    if name == "host_only" and value is True:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return _list(name, value)
    if isinstance(value, Mapping):
        return _mapping(name, value)
    if not is_number(value):
        text = _VALUES.get(name, {}).get(str(value), str(value))
        return group_text(text) if name.endswith("process_group") else text
    if name in _ONE_RANK:
        return f"rank {value}"
    name = name.partition("_by_")[0]  # without "_by_rank", "_by_stage" or "_by_step"
    if name == "ratio" or name.endswith("_ratio"):
        if name.endswith("rise_ratio") and value >= 10:
            return rise_text(value)
        return f"{value:.2f}x" if _is_factor(name) else percent(value)
    if name.endswith("bytes"):
        return size_text(value)
    if name.endswith("_gb_per_s"):
        return rate_text(value)
    if name.endswith("_hertz"):
        return f"{value / 1e6:,.0f} MHz"
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    unit = "" if name in _WITHOUT_UNIT else unit
    if isinstance(value, float):
        return f"{number(value, DIGITS)}{unit}"
    return f"{value:,}{unit}" if unit or name.startswith("num_") else f"{value}{unit}"


def _mapping(name: str, values: Mapping[Any, Any]) -> str:
    """Return each key with its value; the values of `..._calls` and similar names are lists of ranks."""
    parts = [
        f"{key}: {ranks_text(each)}" if isinstance(each, (list, tuple)) else f"{key} {shown(name, each)}"
        for key, each in values.items()
    ]
    has_lists = any(isinstance(each, (list, tuple)) for each in values.values())
    return ("; " if has_lists else ", ").join(parts)


def _list(name: str, values: Sequence[Any]) -> str:
    """The list as text. Ranks become "rank 3" or "ranks 3 and 5", so that they do not look like a count. Other numbers
    are formatted one by one."""
    if (name in ("cycle", "victims") or "ranks" in name.split("_")) and all(type(value) is int for value in values):
        return ranks_text(values)
    if name in ("process_groups", "replica_groups"):
        return listed([group_text(str(value)) for value in values])
    return listed([shown(name, value) if is_number(value) else str(value) for value in values])


def _is_factor(name: str) -> bool:
    return "factor" in name or "speedup" in name or name in ("load_ratio", "ratio")
