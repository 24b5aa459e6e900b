"""Whether a run can do without ranks: a layout, a spare, or a gain above what the smaller world loses."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.config import Config
from trainer.launcher.requested_exclusion import refusal
from watch.exclusion.request import ExclusionRequest


def config(batch: int, **parallel: int) -> Config:
    return Config.model_validate({"train": {"global_batch_size": batch}, "parallel": parallel})


def request(**more: Any) -> ExclusionRequest:
    return ExclusionRequest(attempt=0, ranks=(1,), cause="straggler", reason="Slow.", **more)


@pytest.mark.parametrize(
    ("batch", "met", "asked", "refused"),
    [
        (12, 4, {}, ""),
        (12, 4, {"keeps_size": True}, "no spare: without them 3 of 4 ranks are left"),
        (8, 3, {"keeps_size": True}, ""),  # of three ranks two take part
        (12, 4, {"min_size_ratio": 1 / 1.5}, ""),
        (12, 4, {"min_size_ratio": 1 / 1.2}, "3 ranks would be slower than 4 with the slow one, which costs 1.20x"),
        (8, 3, {"min_size_ratio": 0.99}, ""),  # as large as before
    ],
)
def test_an_exclusion_must_not_slow_the_run(batch: int, met: int, asked: dict[str, Any], refused: str) -> None:
    assert refusal(config(batch), request(**asked), num_available=met, leaving=1) == refused


def test_a_mesh_without_a_free_dimension_keeps_its_ranks() -> None:
    assert "no layout fits on 3" in refusal(config(8, tp=4, dp_shard=1), request(), num_available=4, leaving=1)
