"""A rank that is three times slower is named with its phase, alone; a run without a fault has no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launched import train

LAYOUTS = ("ddp", "fsdp")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("fault", "cause"), [("slow_compute", "compute"), ("slow_data", "data")])
def test_a_slow_rank_is_named_with_its_phase(tmp_path: Path, layout: str, fault: str, cause: str) -> None:
    run = train(
        tmp_path,
        layout,
        faults=[f"{fault}@step=30,rank=3,factor=3"],
        settings=["train.steps=110", "model.dim=64", "data.seq_len=64", "checkpoint.interval=0"],
    )
    stragglers = run.findings("straggler")
    assert [finding["ranks"] for finding in stragglers] == [[3]], run.analyze()["findings"]
    assert stragglers[0]["cause"] == cause
    assert 20 <= stragglers[0]["first_step"] <= 45
    assert run.findings() == stragglers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_clean_run_has_no_finding(tmp_path: Path, layout: str) -> None:
    run = train(tmp_path, layout, settings=["train.steps=200"])
    assert run.findings() == []
    assert not run.events("finding")
    assert run.analyze()["run"]["steps"] == 200
