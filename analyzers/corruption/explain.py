"""Evidence and next step of the corruption findings, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from analyzers.finding import Finding, evidence_of
from analyzers.wording import counted, is_number, number, ranks_text

__all__ = ["NEXT", "WHY"]


def _changed_state(finding: Finding) -> str:
    of = evidence_of(finding)
    proof = []
    if of.get("replica_groups"):
        proof.append(f"differ over {of.get('num_replicas', '?')} replicas")
    if of.get("chain_broken_ranks"):
        proof.append(f"changed on {ranks_text(of['chain_broken_ranks'])} while no optimizer ran")
    where = counted(of.get("num_tensors"), "tensor")
    since = of.get("last_healthy_step")
    checked = "this is the first check" if since is None else f"the last check that agreed was at step {since}"
    return f"Bits{f' of {where}' if where else ''} {' and '.join(proof) or 'differ'}, and {checked}."


def _gradient(finding: Finding) -> str:
    of = finding.evidence
    times: Any = of.get("count_on_device")
    before = f" ({times} times on this device)" if is_number(times) and times > 1 else ""
    return (
        f"The largest element was {number(of.get('peak'))}, {number(of.get('sigmas'))} robust sigmas up, and "
        f"{number(of.get('peak_again'))} when recomputed from the same state and batch{before}."
    )


def _test_device(finding: Finding) -> str:
    return f"{_go_back(finding)}Test the device of {ranks_text(finding.ranks)}, and replace it if this happens twice."


def _test_memory(finding: Finding) -> str:
    device = f"the memory of the device of {ranks_text(finding.ranks)}"
    return f"{_go_back(finding)}Test {device}, and replace it if this happens twice."


def _go_back(finding: Finding) -> str:
    """Advise to go back before the changed weights; empty where the run already did."""
    since = finding.evidence.get("last_healthy_step")
    if since is None or finding.evidence.get("restored_step") is not None:
        return ""
    return f"Resume from a checkpoint of step {since} or before. "


def _watch_device(finding: Finding) -> str:
    return "Watch this device, and if it happens again, take it out and test it."


WHY: Mapping[str, Callable[[Finding], str]] = {
    "replica_mismatch": _changed_state,
    "fingerprint_chain_broken": _changed_state,
    "gradient_corrupted": _gradient,
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "replica_mismatch": _test_device,
    "fingerprint_chain_broken": _test_memory,
    "gradient_corrupted": _watch_device,
}
