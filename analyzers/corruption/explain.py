"""Evidence and next step of the corruption findings, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from analyzers.finding import Finding, evidence_of
from analyzers.wording import counted, is_number, number, ranks_text

__all__ = ["NEXT", "WHY"]


def _changed_state(finding: Finding) -> str:
    facts = evidence_of(finding)
    proof = []
    if facts.get("replica_groups"):
        proof.append(f"differ between {facts.get('num_replicas', '?')} replicas")
    if facts.get("chain_broken_ranks"):
        proof.append(f"changed on {ranks_text(facts['chain_broken_ranks'])} outside an optimizer step")
    where = counted(facts.get("num_tensors"), "tensor")
    since = facts.get("last_healthy_step")
    checked = "this is the first check" if since is None else f"the last check that agreed was at step {since}"
    return f"Bits{f' of {where}' if where else ''} {' and '.join(proof) or 'differ'}, and {checked}."


def _gradient(finding: Finding) -> str:
    facts = finding.evidence
    times: Any = facts.get("count_on_device")
    before = f" ({times} times on this device)" if is_number(times) and times > 1 else ""
    return (
        f"The largest element was {number(facts.get('peak'))}, {number(facts.get('sigmas'))} robust sigmas above "
        f"normal, and {number(facts.get('peak_again'))} when recomputed from the same state and batch{before}."
    )


def _test(what: str, finding: Finding) -> str:
    return f"{_go_back(finding)}Test {what} of {ranks_text(finding.ranks)}, and replace it if this happens twice."


def _go_back(finding: Finding) -> str:
    """Advise to resume from a checkpoint before the weights changed; empty if the run already went back."""
    since = finding.evidence.get("last_healthy_step")
    if since is None or finding.evidence.get("restored_step") is not None:
        return ""
    return f"Resume from a checkpoint of step {since} or before. "


WHY: Mapping[str, Callable[[Finding], str]] = {
    "replica_mismatch": _changed_state,
    "fingerprint_chain_broken": _changed_state,
    "gradient_corrupted": _gradient,
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "replica_mismatch": partial(_test, "the device"),
    "fingerprint_chain_broken": partial(_test, "the memory of the device"),
    "gradient_corrupted": lambda finding: "Drain and test this device if this happens again.",
}
