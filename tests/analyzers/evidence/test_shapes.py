"""Cases by topic: the verdict is right in every form in which a log reaches a reader."""

from __future__ import annotations

import pytest

from benchmarks.incidents.forms import FORMS
from benchmarks.incidents.shapes import score_case
from benchmarks.incidents.topics import CASES, Case

NAMES = ("memory-of-gpu-2", "odd-size-without-groups", "link-local", "gpu-off-the-bus", "raises-in-fairseq")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in NAMES], ids=lambda case: case.name)
def test_a_case_is_right_in_each_form(case: Case, form: str) -> None:
    outcome, verdict = score_case(case, form)
    assert outcome == "right", verdict


def test_held_out_cases_stay_separate() -> None:
    """Cases that came later were made with the rules at hand: none of them counts as held out."""
    assert sum(case.is_held_out for case in CASES) == 19
    assert len(CASES) >= 30
