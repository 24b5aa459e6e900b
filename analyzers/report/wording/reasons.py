"""Why a finding of the machine, of checkpoints, of experts or of gradients is one: its numbers, not its sentence again.

proved(finding)     # "31 % of a step is waiting for data: 66 of 212 ms, in 140 of 150 steps"; "" for another kind
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analyzers.finding import Finding
from analyzers.memory.limits import size_text
from analyzers.wording import counted, is_number

__all__ = ["proved"]


def proved(finding: Finding) -> str:
    """One line from the evidence; empty where there is none of this kind."""
    numbers = finding.evidence
    make = _REASONS.get(finding.kind)
    return "" if make is None else make(finding, numbers)


def _data_bound(finding: Finding, of: Mapping[str, Any]) -> str:
    rhythm = f", every {of['every_steps']} steps" if of.get("every_steps") else ""
    return (
        f"{_percent(of.get('data_ratio'))} of the time of a step is waiting for data, {_number(of.get('data_ms'))} of "
        f"{_number(of.get('step_ms'))} ms and at most {_number(of.get('data_highest_ms'))} ms, in "
        f"{of.get('starved_steps', '?')} of {of.get('steps', '?')} steps{rhythm}"
    )


def _memory_growth(finding: Finding, of: Mapping[str, Any]) -> str:
    left = f"; {_size(of.get('left_bytes'))} are left" if is_number(of.get("left_bytes")) else ""
    return (
        f"from {_size(of.get('memory_first_bytes'))} to {_size(of.get('memory_last_bytes'))}, and as fast in the last "
        f"third as before{left}"
    )


def _memory_limit(finding: Finding, of: Mapping[str, Any]) -> str:
    if finding.cause == "allocator":
        idle = f"{_size(of.get('reserved_bytes'))} reserved against {_size(of.get('allocated_bytes'))} allocated"
        seconds = of.get("num_seconds_with_retries", "?")
        return f"torch counted {of.get('num_retries', '?')} retries in {seconds} seconds of the run; {idle}"
    return (
        f"at most {_size(of.get('highest_bytes'))} of {_size(of.get('total_bytes'))} in its readings, "
        f"{_size(of.get('newest_bytes'))} in the newest"
    )


def _memory_imbalance(finding: Finding, of: Mapping[str, Any]) -> str:
    return f"{_size(of.get('highest_bytes'))} at most, against {_size(of.get('highest_of_peers_bytes'))} of its peers"


def _xid(finding: Finding, of: Mapping[str, Any]) -> str:
    message = str(of.get("message") or "").strip().splitlines()
    times = "once" if of.get("count") == 1 else f"{of.get('count', '?')} times"
    said = f": {message[0]}" if message else ""
    return f"the driver reported it {times} on {of.get('node') or 'its host'}, class {finding.cause}{said}"


def _gpu_memory_errors(finding: Finding, of: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{name.replace('_', ' ')} {of[name]}" for name in _ECC if of.get(name))
    return f"counters of the device that rose during the run: {counts or 'none, but a flag is set'}"


_ECC = ("uncorrected", "corrected", "remapped_rows")


def _gpu_throttled(finding: Finding, of: Mapping[str, Any]) -> str:
    clock: Any = of.get("clock_median_hertz")
    at = f"; its clock was {clock / 1e6:,.0f} MHz at the median" if is_number(clock) else ""
    heat = f", {of['hottest_celsius']:.0f} degrees at most" if is_number(of.get("hottest_celsius")) else ""
    return f"{_percent(of.get('throttled_ratio'))} of {of.get('readings', '?')} readings under load say so{heat}{at}"


def _link_errors(finding: Finding, of: Mapping[str, Any]) -> str:
    told = [
        f"{of[name]:,} {words}"
        for name, words in (("nvlink_errors", "errors on NVLinks"), ("pcie_replays", "packets again over PCIe"))
        if is_number(of.get(name))
    ]
    return f"what its counters rose by during the run: {', '.join(told)}"


def _host_pressure(finding: Finding, of: Mapping[str, Any]) -> str:
    if finding.cause == "disk":
        return f"{_size(of.get('disk_free_bytes'))} free now, {_size(of.get('disk_free_lowest_bytes'))} at least so far"
    return (
        f"in {_percent(of.get('waiting_ratio'))} of the readings more want to run than {of.get('num_cpus', '?')} CPUs "
        f"can take, {_number(of.get('load_median'))} at the median"
    )


def _checkpoint_failed(finding: Finding, of: Mapping[str, Any]) -> str:
    good = of.get("num_good_since")
    since = f"{counted(good, 'save')} since then went well" if good else "nothing has been saved since"
    return f"{str(of.get('reason') or 'no reason was recorded').splitlines()[0]}; {since}"


def _checkpoint_age(finding: Finding, of: Mapping[str, Any]) -> str:
    return (
        f"{of.get('age_steps', '?')} steps without a good save, {_number(of.get('lost_s'))} s of training, where one "
        f"is due every {of.get('interval_steps', '?')} steps"
    )


def _node_silent(finding: Finding, of: Mapping[str, Any]) -> str:
    after = "it was heard again" if of.get("heard_again") else "nothing was heard of it since"
    return f"its watch reports each second, and did not for {_number(of.get('silent_s'))} s; {after}"


def _excluded(finding: Finding, of: Mapping[str, Any]) -> str:
    failures: Any = of.get("num_failures")
    known = is_number(failures) and failures > 0
    count = f"{counted(failures, 'failure')} there" if known else "it failed again and again"
    return f"{count}, of a kind that hardware can cause; the run went on without it"


_REASONS = {
    "data_bound": _data_bound,
    "memory_growth": _memory_growth,
    "memory_limit": _memory_limit,
    "memory_imbalance": _memory_imbalance,
    "xid": _xid,
    "gpu_memory_errors": _gpu_memory_errors,
    "gpu_throttled": _gpu_throttled,
    "link_errors": _link_errors,
    "host_pressure": _host_pressure,
    "checkpoint_failed": _checkpoint_failed,
    "checkpoint_age": _checkpoint_age,
    "node_silent": _node_silent,
    "excluded": _excluded,
}


def _number(value: Any) -> str:
    return f"{value:.3g}" if is_number(value) else "?"


def _percent(value: Any) -> str:
    return f"{100 * value:.0f} %" if is_number(value) else "?"


def _size(value: Any) -> str:
    return size_text(value) if is_number(value) else "?"
