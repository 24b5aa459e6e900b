"""docs/kinds.md and docs/thresholds.md are what the code says, and the code says enough."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analyzers.analysis import analyses
from analyzers.kinds import KINDS
from analyzers.report import kinds_page, thresholds_page

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize(("name", "page"), [("kinds", kinds_page), ("thresholds", thresholds_page)])
def test_the_page_is_up_to_date(name: str, page: object) -> None:
    written = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert written == page.markdown(), f"python -m {page.__name__} > docs/{name}.md"  # type: ignore[attr-defined]


def test_every_threshold_is_described() -> None:
    bare = [
        f"{policy.module} {policy.name}.{name}"
        for _, found in thresholds_page.policies()
        for policy in found
        for name, default, meaning in policy.thresholds
        if not meaning and not default.endswith("()") and "factory" not in default
    ]
    assert not bare, "\n".join(bare)


def test_thresholds_stay_few() -> None:
    """Before a field is added, look for one that means the same, as those of SharedPolicy."""
    fields = [line for line in thresholds_page.markdown().splitlines() if line.startswith("- `")]
    assert len(fields) < 200


def test_every_kind_is_judged_once_and_in_the_runbook() -> None:
    judged = [kind for analysis in analyses() for kind in analysis.kinds]
    assert sorted(judged) == sorted(set(judged)), "two analyses report one kind"
    assert set(judged) == set(KINDS)
    anchors = set(re.findall(r'<a id="([\w-]+)"', (DOCS / "runbook.md").read_text(encoding="utf-8")))
    missing = [
        name
        for name, kind in KINDS.items()
        if kind.drawn and not any(anchor.startswith(name.replace("_", "-")) for anchor in anchors)
    ]
    assert not missing, missing
