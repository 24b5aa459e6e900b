"""Advice and meaning that go with a line's own wording: fabric manager, a silent GPU, a quota, CANN's codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.external.logs.wording import next_step
from tests.analyzers.external.written import diagnosed

RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in main\n    step()\n{error}\n'


@pytest.mark.parametrize(
    ("error", "cause", "advice"),
    [
        ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
         "device_setup", "fabric manager"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk_full", "quota -s"),
        ("OSError: [Errno 28] No space left on device", "disk_full", "Free space"),
        ("RuntimeError: NPU function error: AclrtSynchronizeStreamWithTimeout(s), error code is 507035",
         "device_error", "errorStr"),
    ],
)  # fmt: skip
def test_each_wording_of_a_cause_has_its_own_advice(tmp_path: Path, error: str, cause: str, advice: str) -> None:
    first = diagnosed(tmp_path, "job.log", RAISED.format(error=error)).fired[0]
    assert first.cause == cause
    assert advice in next_step(first)


def test_a_gpu_that_nvidia_smi_cannot_open_is_the_devices_error(tmp_path: Path) -> None:
    text = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n"
    first = diagnosed(tmp_path, "smi.txt", text).fired[0]
    assert (first.cause, "3B:00.0" in first.summary) == ("device_error", True)
    assert "reset the GPU" in next_step(first)


def test_a_code_of_the_runtime_is_said_with_its_meaning(tmp_path: Path) -> None:
    error = "RuntimeError: NPU function error: AclrtSynchronizeStreamWithTimeout(s), error code is 507035"
    assert "507035: vector core exception" in diagnosed(tmp_path, "job.log", RAISED.format(error=error)).verdict


def test_a_code_of_hccl_is_said_with_its_meaning_and_blames_no_rank(tmp_path: Path) -> None:
    text = "[rank1]: EI0006: [PID: 7] Getting socket times out. Remote Rank did not send the data\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert "EI0006: no socket to another rank within the timeout" in first.summary
    assert first.ranks == ()


def test_a_rank_of_deepspeeds_command_line_is_the_one_that_aborted(tmp_path: Path) -> None:
    text = (
        "Indexing.cu:1141: indexSelectLargeIndex: block: [6,0,0], thread: [1,0,0] Assertion `srcIndex < n` failed.\n"
        + RAISED.format(error="RuntimeError: CUDA error: device-side assert triggered")
        + "[ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py', '--local_rank=3'] exits with return code = -6\n"
    )
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("device_assert", (3,))


def test_a_fatal_error_of_a_switch_is_named_and_others_are_not(tmp_path: Path) -> None:
    text = "[  9.1] nvidia-nvswitch3: open (major=509)\n[ 10.2] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): {error}\n"
    quiet = diagnosed(tmp_path, "a.txt", text.format(error="12028, Non-fatal, Link 45 egress non-posted PRIV error"))
    assert quiet.fired == ()
    first = diagnosed(tmp_path, "a.txt", text.format(error="20034, Fatal, Link 30 LTSSM Fault Up")).fired[0]
    assert "An NVSwitch reported a fatal error: SXid 20034, Link 30 LTSSM Fault Up" in first.summary


# ---- the loss scale of fp16 ----

LINE = " iteration {step:8}/ 9000 | elapsed time per iteration (ms): 80.0 | lm loss 6.5E+00 | loss scale {scale} |\n"


def scales(values: list[float]) -> str:
    return "".join(LINE.format(step=100 * place, scale=value) for place, value in enumerate(values, 1))


def test_a_printed_loss_scale_that_falls_to_its_floor_is_exhausted(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", scales([4096.0, 64.0, 8.0, 2.0, 1.0, 0.5, 0.5])).fired[0]
    assert first.kind == "non_finite"
    assert "from 4096 at step 100 to 1 at step 500" in first.summary
    assert "bf16" in next_step(first)


@pytest.mark.parametrize("values", [[1.0] * 9, [2.0**32, 65536.0, 32768.0, 65536.0], [64.0, 1.0, 2.0, 4.0, 8.0]])
def test_a_loss_scale_that_is_constant_or_recovers_is_none(tmp_path: Path, values: list[float]) -> None:
    assert diagnosed(tmp_path, "job.log", scales(values)).fired == ()


def test_a_scaler_that_goes_below_one_is_exhausted(tmp_path: Path) -> None:
    text = scales([8.0]) + "".join(
        f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}\n"
        for scale in ("1.0", "0.5", "0.25", "2.9e-39")
    )
    assert "loss scale is exhausted" in diagnosed(tmp_path, "job.log", text).verdict
