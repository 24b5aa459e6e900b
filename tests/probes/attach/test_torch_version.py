"""A version of torch that was never tried is one line, and no reason to stop."""

from __future__ import annotations

import logging

import pytest

from probes.attach.open_recorder import warn_if_untried
from rankscope.commands.train import too_old_torch


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        ("2.5.1", True), ("2.6.0+cu126", False), ("2.13.0+cpu", False), ("2.15.0a0+git1", False),
        ("2.16.0", True), ("3.0.0", True), ("unknown", False),
    ],
)  # fmt: skip
def test_a_version_outside_of_those_tried_is_one_line(
    version: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rankscope.probes"):
        assert warn_if_untried(version) is warns
    assert [version in record.getMessage() for record in caplog.records] == [True] * warns


def test_training_says_which_torch_it_needs() -> None:
    assert "2.6.0" in too_old_torch("2.6.0+cu124")
    assert "2.11" in too_old_torch("2.10.0")
    assert too_old_torch("2.11.0") == too_old_torch("2.13.0+cpu") == too_old_torch("main") == ""
