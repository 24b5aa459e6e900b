"""What a failed probe logs: its traceback once, and of a device that failed one line for all probes."""

from __future__ import annotations

import builtins
import io
import logging
from collections import Counter

import pytest

from probes import fail_open
from probes.fail_open import DEVICE, failing_open

FAILED = "CUDA error: device-side assert triggered\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "")
    monkeypatch.setattr("probes.fail_open.error_counts", Counter())


def fail(place: str, message: str) -> None:
    with failing_open(place):
        raise RuntimeError(message)


def test_a_failed_device_is_told_in_one_line_for_all_probes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rankscope.probes"):
        for place in ("recorder.span", "gradients", "recorder.span"):
            fail(place, FAILED)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the device of this process failed and is not measured from here on: device-side assert triggered"
    )
    assert record.exc_info is None, "a traceback of ours above the program's own hides that"
    assert fail_open.error_counts == {DEVICE: 3}


@pytest.mark.parametrize(
    "message", ["CUDA error: out of memory", "CUDA error: operation not permitted", "no such name"]
)
def test_other_errors_of_a_probe_keep_their_place_and_traceback(message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rankscope.probes"):
        fail("gradients", message)
        fail("gradients", message)
    (record,) = caplog.records
    assert "probe gradients failed" in record.getMessage()
    assert record.exc_info


def test_an_error_whose_traceback_cannot_be_written_does_not_reach_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contrastive learners silence all ranks but the first with a `print` that takes no `file`."""
    handler = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(fail_open.logger, "handlers", [handler])
    monkeypatch.setattr(fail_open.logger, "propagate", False)

    def silent(*unused: object) -> None:
        return None

    monkeypatch.setattr(builtins, "print", silent)
    fail("gradients", "a bad shape")
    assert fail_open.error_counts == {"gradients": 1}
