"""Labels and units of evidence.

    label_of("cpu_time_excess_ms")          # "more processor time"
    shown("left_bytes", 12_884_901_888)     # "12 GiB"

A name without an entry is read as it is written: without its unit and `num_`, with spaces.
"""

from __future__ import annotations

from typing import Any

from analyzers.wording import is_number, listed, size_text

__all__ = ["label_of", "shown"]

_LABELS = {
    "age_steps": "age of the checkpoint",
    "agreeing_steps_ratio": "steps that agree",
    "arrives_last_ratio": "arrives last",
    "batch_index": "batch",
    "batch_indices": "batches",
    "caused_wait_ratio": "its share of waiting",
    "certain_at_step": "certain at step",
    "chain_broken_ranks": "ranks that changed alone",
    "comes_back": "repeated by a replay",
    "comes_back_when_restored": "from an older state too",
    "core_wait_excess_ms": "more waiting for a core",
    "count": "times",
    "count_on_device": "times on this device",
    "cpu_time_excess_ms": "more processor time",
    "data_highest_ms": "longest wait for data",
    "data_ms": "wait for data per step",
    "data_ratio": "waiting for data",
    "disk_free_bytes": "free on its disk",
    "disk_free_lowest_bytes": "least free so far",
    "dropped_ratio": "dropped choices",
    "every_steps": "waits every",
    "excess_ms": "slower by",
    "factor_ratio": "factor",
    "gc_excess_ms": "more garbage collection",
    "grad_norm": "gradient norm",
    "grad_norm_rise_ratio": "rise of gradient norm",
    "grad_norm_z": "gradient norm deviation",
    "growth_a_step_bytes": "growth per step",
    "highest_bytes": "most in use",
    "highest_of_peers_bytes": "most of its peers",
    "host_load_per_cpu": "load of its host per CPU",
    "interval_steps": "due every",
    "judgement": "judgement of the replay",
    "left_bytes": "left until full",
    "load_median": "runnable (median)",
    "load_ratio": "load over an even share",
    "lost_s": "lost by a failure",
    "lr": "learning rate",
    "major_faults_excess": "more pages from disk",
    "memory_first_bytes": "memory at first",
    "memory_last_bytes": "memory at the end",
    "newest_bytes": "in use at the end",
    "node_rank": "node",
    "noise_ratio": "noise of a step",
    "norm_of_others": "norm of the others",
    "norm_of_start": "largest norm at first",
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
    "num_steps": "steps concerned",
    "num_tensors": "tensors concerned",
    "op": "collective",
    "origin_module": "first bad output of",
    "origin_operation": "in operation",
    "peak": "largest element",
    "peak_again": "the same, recomputed",
    "peers_wait_more_ms": "its peers wait more by",
    "per_block_factor_ratio": "factor per block",
    "ranks_with_nonfinite_local_loss": "ranks with a bad loss",
    "ratio": "share of the expected",
    "readings": "readings under load",
    "reason_bit": "bit of NVML's reasons",
    "replay_error_ratio": "error of the what-if",
    "rise_factor_ratio": "rise over the start",
    "run_s": "time of all steps",
    "run_without_it_s": "all steps without it",
    "seq": "sequence number",
    "sigmas": "robust deviations",
    "silent_s": "silent for",
    "speedup_without_it_ratio": "speed-up without it",
    "stall_ms": "stall per save",
    "stall_ratio": "stalled in saves",
    "starved_steps": "steps that waited",
    "step_ms": "step time in these steps",
    "step_without_it_ms": "the same without it",
    "steps": "steps judged",
    "steps_slow": "slow steps",
    "steps_to_out_of_memory": "steps until it is full",
    "throttled_ratio": "slowed down",
    "time_to_out_of_memory_s": "time until then",
    "time_until_full_s": "full in",
    "place": "part of the step",
    "cycle": "waiting for each other",
    "turn": "execution of the step",
    "work_ms_by_coordinate": "work (ms) by stage",
    "tokens_excess_ratio": "more tokens",
    "total_bytes": "capacity",
    "used_ratio": "used",
    "waiting_ratio": "time with a queue",
    "xid": "XID",
}
_VALUES = {
    "pattern": {
        "chronic": "since the start",
        "since": "from its first step on",
        "transient": "temporary",
        "intermittent": "intermittent",
        "pauses": "occasional pauses",
        "rotating": "rotating over ranks",
    },
    "judgement": {"data_or_numerics": "data or numerics"},
}
_UNITS = {
    "_gb_per_s": " GB/s",
    "_ms": " ms",
    "_s": " s",
    "_z": " sigma",
    "_celsius": " °C",
    "_tokens": " tokens",
    "_steps": " steps",
}
_WITHOUT_UNIT = ("starved_steps", "open_steps", "num_steps")  # counts, whose label says of what


def label_of(name: str) -> str:
    """The label of a value."""
    if name in _LABELS:
        return _LABELS[name]
    for suffix in ("_ratio", "_bytes", "_hertz", *_UNITS):
        if name.endswith(suffix) and suffix != "_steps":
            name = name.removesuffix(suffix) + (" deviation" if suffix == "_z" else "")
            break
    return name.removeprefix("num_").replace("_", " ")


def shown(name: str, value: Any) -> str:
    """The value with its unit; long lists are cut."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return listed(value)
    if not is_number(value):
        return _VALUES.get(name, {}).get(str(value), str(value))
    if name.endswith("_ratio"):
        return f"{value:.2f}x" if "factor" in name or "speedup" in name or name == "load_ratio" else _percent(value)
    if name.endswith("bytes"):
        return size_text(value)
    if name.endswith("_hertz"):
        return f"{value / 1e6:,.0f} MHz"
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    unit = "" if name in _WITHOUT_UNIT else unit
    return f"{value:.5g}{unit}" if isinstance(value, float) else f"{value}{unit}"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %" if abs(ratio) >= 0.1 else f"{100 * ratio:.2g} %"
