"""The state of a run in one word, and why."""

from __future__ import annotations

import pytest

from analyzers.run.live.state import run_state
from analyzers.run.policy import StallPolicy
from tests.analyzers.standstill import World


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_run_that_no_watch_updates_states_the_source_of_its_records(is_copy: bool) -> None:
    world = World()
    state = run_state(world.store, StallPolicy(), now_ns=world.after(1), is_watched=False, is_copy=is_copy)
    reason = (
        "a copy of its published records, no longer updated" if is_copy else "no watch process; read from its tapes"
    )
    assert (state.word, state.reason) == ("training", reason)


def test_a_silence_in_which_its_ranks_work_is_told_with_the_word() -> None:
    world = World(ranks=1)
    world.event("silent_work", 4.0, ranks=[0], idle_ranks=[], cores=1.0)
    state = run_state(world.store, StallPolicy(), now_ns=world.after(20), is_watched=True)
    assert (state.word, state.reason) == ("training", "no record for 20 s, while its ranks compute or read files")
