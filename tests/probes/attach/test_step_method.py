"""The method of an optimizer that is none of torch's, while it is watched and in copies."""

from __future__ import annotations

import copy
import pickle

from probes.attach.loop.step_method import around_step


class Sign:
    """An optimizer that only counts."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, by: int = 1) -> int:
        self.steps += by
        return self.steps


def test_a_copy_steps_by_itself_and_is_not_watched() -> None:
    optimizer, calls = Sign(), []
    undo = around_step(optimizer, lambda one: calls.append(("before", one)), lambda one: calls.append(("after", one)))
    assert optimizer.step(2) == 2
    assert calls == [("before", optimizer), ("after", optimizer)]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        assert copied.step() == 3
        assert optimizer.steps == 2
        assert len(calls) == 2
    undo()
    assert optimizer.step() == 3
    assert len(calls) == 2
