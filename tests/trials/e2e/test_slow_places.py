"""A plain DDP script whose rank 1 loses 20 ms a step in one of eight places: rank and place are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import diagnose
from probes.tape.rundir import RunDir
from store import Store
from tests.e2e.script_ranks import ROOT, ScriptRanks
from tests.sentences import assert_plain

SCRIPT = ROOT / "tests" / "e2e" / "slow_ddp.py"
STEPS = 70
PLACES = {
    # A loop that makes its batches itself does not show where one step ends and the next begins.
    "batch": ("after_optimizer", "after the optimizer or in making the next batch"),
    "forward": ("forward", "in forward"),
    "after_forward": ("forward_to_backward", "between forward and backward"),
    "backward": ("backward", "in backward"),
    "clipping": ("backward_to_optimizer", "between backward and the optimizer"),
    "before_optimizer": ("backward_to_optimizer", "between backward and the optimizer"),
    "after_optimizer": ("after_optimizer", "after the optimizer"),
    "collection": ("backward_to_optimizer", "between backward and the optimizer"),
}
"""Where rank 1 is slow: the finding's place, and its words."""


SLOW = {"forward", "before_optimizer", "after_optimizer"}
"""Places whose phase or gap another place has, too."""


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.slow if place in SLOW else ()) for place in PLACES]
)
def test_the_slow_rank_and_the_place_are_named(place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ScriptRanks(SCRIPT, place, str(STEPS), cwd=tmp_path, run_dir=run_dir, unattended=True) as ranks:
        ranks.join()
    run = RunDir.open(run_dir)
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest())
    (found,) = [finding for finding in diagnosis.fired if finding.kind == "straggler"]
    named, words = PLACES[place]
    assert (found.ranks, found.evidence["place"]) == ((1,), named)
    assert found.cause == "host"
    assert words in found.summary
    assert found.summary in diagnosis.verdict
    assert_plain(found.summary)
    assert found.evidence["excess_ms"] > 15
