"""Findings and facts of one source of a job's files.

judged = Judged(findings={"log": [...], "health": [...]}, facts={"num_ranks": 8})
facts = with_facts_of(facts, judged)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analyzers.finding import Finding
from analyzers.whatif.what_if import WhatIf

__all__ = ["Judged", "with_facts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`findings`: {source: findings}, as `joining` expects. An empty list: the check found nothing."""

    findings: Mapping[str, Sequence[Finding]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    what_if: WhatIf | None = None


def with_facts_of(facts: Mapping[str, Any], judged: Judged) -> dict[str, Any]:
    """Add the facts that no earlier source has; for `num_ranks` the largest is kept."""
    known = {name: value for name, value in facts.items() if value is not None}
    num_ranks = max(facts.get("num_ranks") or 0, judged.facts.get("num_ranks") or 0) or None
    return {**judged.facts, **known, "num_ranks": num_ranks}
