"""A job of one rank, as what is left of an elastic world, that was ended from outside."""

from __future__ import annotations

import pytest

from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_losses
from tests.analyzers.standstill import World

ENDS = {
    "run_ended": "ended from outside at step 16: its launcher got SIGINT, and rank 0 stopped.",
    "rank_exit": "Rank 0 was terminated from outside at step 16: it stopped without an error.",
    "": "Records incomplete: rank 0 stopped at step 16, and no record shows how. It was killed from outside",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_summary_about_one_rank_is_in_the_singular(end: str) -> None:
    world = World(ranks=1)
    if end == "rank_exit":
        world.event(end, 0.1, exit_rank=0, exit_code=-15, signal="SIGTERM", pid=7, message="")
    elif end:
        world.event(end, 0.1, reason="interrupted", exit_code=130, message="")
    (finding,) = judged_losses(world.store, StallPolicy())
    assert ENDS[end] in finding.summary
