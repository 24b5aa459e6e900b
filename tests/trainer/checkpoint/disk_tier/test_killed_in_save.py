"""SIGKILL at any moment of a save: what is loaded next is whole, and the run goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.durability.checkpoint_kills import kill_inside_saves
from tests.depth import tried


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "kills"), [(1, tried(2, nightly=10)), (2, tried(1, nightly=5))])
def test_killed_inside_saves(world_size: int, kills: int, tmp_path: Path) -> None:
    """The short form of `python -m benchmarks.durability.checkpoint_kills`, whose docstring says what is checked."""
    outcome = kill_inside_saves(tmp_path, kills=kills, world_size=world_size, seed=world_size)
    assert outcome.problems == []
    assert outcome.kills_inside >= kills
    assert outcome.compared_losses >= kills
