"""Facts of several sources of one job."""

from __future__ import annotations

import pytest

from analyzers.evidence.judged import Judged, with_facts_of


def test_facts_of_an_earlier_source_stand_and_unknown_ones_are_filled_in() -> None:
    judged = Judged(findings={}, facts={"steps": 90, "ended": "finished", "num_ranks": None})
    assert with_facts_of({"steps": 100, "ended": None}, judged) == {
        "steps": 100,
        "ended": "finished",
        "num_ranks": None,
    }


@pytest.mark.parametrize(("known", "found"), [(4, 8), (8, 4), (8, None), (None, 8)])
def test_the_largest_number_of_ranks_is_that_of_the_job(known: int | None, found: int | None) -> None:
    assert with_facts_of({"num_ranks": known}, Judged(findings={}, facts={"num_ranks": found}))["num_ranks"] == 8
