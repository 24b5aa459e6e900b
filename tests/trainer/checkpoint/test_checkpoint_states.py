"""The states of a checkpoint: what may follow what, and nothing else."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.lifecycle import FOLLOWERS, IllegalTransition, States

LEGAL = {(before, after) for before, followers in FOLLOWERS.items() for after in followers}
NAMES = [name for name in FOLLOWERS if name]


@pytest.mark.parametrize(("before", "after"), sorted(itertools.product(FOLLOWERS, NAMES)))
def test_only_documented_transitions_are_allowed(before: str, after: str) -> None:
    states = States()
    if before:
        states.found(7, before)
    if (before, after) in LEGAL:
        states.advance(7, after)
        assert states.of(7) == after
    else:
        with pytest.raises(IllegalTransition, match="step 7"):
            states.advance(7, after)
        assert states.of(7) == before


@given(st.lists(st.sampled_from(NAMES), max_size=30))
def test_good_follows_only_verified_and_nothing_leads_back_from_condemned(wishes: list[str]) -> None:
    states, history = States(), [""]
    for wish in wishes:
        try:
            states.advance(1, wish)
        except IllegalTransition:
            continue
        history.append(wish)
    for before, after in itertools.pairwise(history):
        if after == "good":
            assert before == "verified"
        if after == "verified":
            assert before == "complete"
        if before in ("condemned", "failed", "removed"):
            assert after in ("writing", "removed")


def test_steps_have_independent_states() -> None:
    states = States()
    states.advance(1, "writing")
    assert states.of(2) == ""
    with pytest.raises(IllegalTransition):
        states.advance(2, "complete")
