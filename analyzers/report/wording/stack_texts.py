"""Stacks and traceback of a finding as headings and lines, identical in all reports.

    for heading, frames in stack_texts(finding.evidence):
        ...                      # "odd one out: rank 3 (stage 1), in data, innermost first", ["loader.py:41 read", ...]

The evidence may come from an untrusted file: entries of the wrong form are left out, and sizes are bounded. The caller
escapes the lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analyzers.wording import processes_text, ranks_text

__all__ = ["stack_texts"]

MAX_TEXTS = 32
MAX_FRAMES = 60
MAX_CHARACTERS = 2_000


def stack_texts(evidence: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Heading and frames of each stack, the most relevant first."""
    return [
        (heading, [str(frame)[:MAX_CHARACTERS] for frame in frames[:MAX_FRAMES]])
        for heading, frames in _with_headings(evidence)
    ][:MAX_TEXTS]


def _with_headings(evidence: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    traceback = evidence.get("traceback")
    if isinstance(traceback, (list, tuple)) and traceback:
        yield "traceback, innermost first", traceback
    groups = evidence.get("stack_groups")
    if isinstance(groups, (list, tuple)) and groups:
        for group in groups:
            if isinstance(group, Mapping):
                yield _heading(group), _sequence(group.get("frames"))
        return
    stacks = evidence.get("stacks")
    for rank, frames in (stacks if isinstance(stacks, Mapping) else {}).items():
        yield f"Python stack of rank {rank}, innermost first", _sequence(frames)


def _heading(group: Mapping[str, Any]) -> str:
    ranks = [rank for rank in _sequence(group.get("ranks")) if type(rank) is int]
    number = group.get("num_ranks")
    number = number if isinstance(number, int) else len(ranks)
    if group.get("is_rest"):
        return f"and {number} ranks with other stacks"
    pids = [pid for pid in _sequence(group.get("pids")) if type(pid) is int]
    who = ranks_text(ranks) if ranks else processes_text(pids) if pids and all(pids) else "unknown ranks"
    if number > 1:
        kind = "processes" if who.startswith("processes") else "ranks"
        who = f"{number} {kind} have the same stack: {who.removeprefix(f'{kind} ')}"
        who += f" and {number - len(ranks)} more" * (number > len(ranks) > 0)
    place = f" ({group['role']})" if group.get("role") else ""
    doing = f", {group['doing']}" if group.get("doing") else ""
    odd = "odd one out: " if group.get("is_odd") else ""
    end = "innermost first" if _sequence(group.get("frames")) else "no stack"
    return f"{odd}{who}{place}{doing}, {end}"


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()
