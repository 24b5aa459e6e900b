"""Evidence and next step of findings on memory, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from analyzers.finding import Finding
from analyzers.wording import is_number, size_text

__all__ = ["NEXT", "WHY"]


def _why_growth(finding: Finding) -> str:
    facts = finding.evidence
    left = f", with {size_text(facts.get('headroom_bytes'))} left" if is_number(facts.get("headroom_bytes")) else ""
    first, last = size_text(facts.get("memory_first_bytes")), size_text(facts.get("memory_last_bytes"))
    return f"It rose from {first} to {last}, as fast in the last third as before{left}."


def _why_limit(finding: Finding) -> str:
    facts = finding.evidence
    if finding.cause == "allocator":
        sizes = (
            f"{size_text(facts.get('reserved_bytes'))} reserved, {size_text(facts.get('allocated_bytes'))} allocated"
        )
        seconds = facts.get("num_seconds_with_retries", "?")
        return f"PyTorch counted {facts.get('num_retries', '?')} retries in {seconds} seconds of the run, with {sizes}."
    return (
        f"Readings show at most {size_text(facts.get('highest_bytes'))} of {size_text(facts.get('total_bytes'))} in "
        f"use, {size_text(facts.get('newest_bytes'))} in the newest."
    )


def _why_imbalance(finding: Finding) -> str:
    facts = finding.evidence
    peers = size_text(facts.get("highest_of_peers_bytes"))
    return f"Its peak is {size_text(facts.get('highest_bytes'))}, and the median of its peers' peaks is {peers}."


def _next_limit(finding: Finding) -> str:
    return {
        "allocator": "Use a smaller microbatch or activation checkpointing, or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation.",
        "device": "Nothing to do unless it runs out: then a smaller microbatch or activation checkpointing.",
        "host": "Use fewer processes, loader workers or checkpoint copies in /dev/shm on that host.",
    }.get(finding.cause, "Use a smaller microbatch, activation checkpointing, or fewer processes on the host.")


WHY: Mapping[str, Callable[[Finding], str]] = {
    "memory_growth": _why_growth,
    "memory_limit": _why_limit,
    "memory_imbalance": _why_imbalance,
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "memory_growth": lambda finding: "Check what is kept between steps: losses with their graph, lists, caches.",
    "memory_limit": _next_limit,
    "memory_imbalance": lambda finding: "Check what only this rank holds: logging, evaluation, uneven layers.",
}
