"""One run meets as many random faults as a soak of three minutes brings, faster: it gets up each time, and learns.

An hour of it is `python -m benchmarks.durability.soak --minutes 60`. Here the faults are 12 steps apart instead of 20
seconds, so that the proof, which lies in their number and in what one leaves behind for the next, takes a minute and
not three.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.durability import soak
from tests.e2e.launched import SOURCE, TINY

FAULTS = 10
"""Three minutes with one every 20 seconds."""


@pytest.mark.timeout(400)
def test_ten_faults_in_one_run_lose_no_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(SOURCE * 4)
    settings = (*TINY, f"data.path=['{text}']", "parallel.dp_shard=4", "recovery.hang_floor_s=3")
    changes = [part for setting in settings for part in ("--set", setting)]
    told = tmp_path / "soak.json"
    files = ["--keep", str(tmp_path / "soak"), "--json", str(told)]
    code = soak.main(["--faults", str(FAULTS), "--apart", "12", "--seed", "66", *files, *changes])
    printed, found = capsys.readouterr().out, json.loads(told.read_text())
    assert code == 0, printed
    assert found["struck"] == FAULTS, printed
    assert found["attempts"] > 2, printed
    assert found["wedged"] == 0
    assert found["batches"] == "exact"
    assert found["loss_last"] < 0.9 * found["loss_first"]
    assert f"goodput        {found['goodput']}" in printed
    assert found["exit_code"] == 0
