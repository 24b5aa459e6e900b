"""Which device a death counts against: its own for an error of its own, none for another rank's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from probes.tape.rundir import RunDir
from trainer.launcher.device_at_fault import Death, find_culprit, log_tail, xids_by_rank

WATCHDOG = (
    "[rank3]:[E1122 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=41, OpType=ALLREDUCE) ran for 600012 milliseconds before timing out.\n"
    "[E1122 ProcessGroupNCCL.cpp:740] To avoid data inconsistency, we are taking the entire process down.\n"
)
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize("text", [WATCHDOG, REMOTE], ids=["watchdog", "remote error"])
def test_a_watchdogs_abort_after_a_remote_loss_blames_no_device(text: str) -> None:
    assert find_culprit({1: Death(code=-6, text=text)}, {}) is None


@pytest.mark.parametrize(
    "text",
    [ECC, "NVML: GPU is lost", "CUDA error: hardware stack error", "the GPU has fallen off the bus"],
)
def test_an_error_of_the_device_blames_exactly_that_device(text: str) -> None:
    """It is an exception, so its exit code is 1; the others' watchdogs end with signals, perhaps seen before it."""
    deaths = {0: Death(code=-6, text=WATCHDOG), 2: Death(code=1, text=text), 3: Death(code=-6, text=REMOTE)}
    assert find_culprit(deaths, {}) == 2


def test_an_xid_blames_the_device_that_it_names() -> None:
    assert (
        find_culprit({0: Death(code=-6), 1: Death(code=1, text="RuntimeError: CUDA error: unknown error")}, {1: 79})
        == 1
    )


def test_deaths_by_a_signal_count_and_others_do_not() -> None:
    assert find_culprit({1: Death(code=-11)}, {}) == 1
    assert find_culprit({1: Death(code=-9)}, {}) == 1  # with which `watch` ends a rank that hangs
    for innocent in (Death(code=-15), Death(code=1, text="ValueError"), Death(code=-9, out_of_memory=True)):
        assert find_culprit({1: innocent}, {}) is None


def test_xids_are_joined_with_ranks_by_the_devices_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def write(folder: Path, *events: dict[str, object]) -> None:
        folder.mkdir(parents=True)
        lines = (json.dumps({"wall_ns": 1, "attempt": 2, "rank": -1, **event}) for event in events)
        (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines))

    write(
        run.node_dir(0),
        {"kind": "xid", "xid": 79, "device": "GPU-b"},
        {"kind": "xid", "xid": 13, "device": "GPU-a"},  # a kernel's own fault
        {"kind": "xid", "xid": 48, "device": "GPU-a", "attempt": 1},
    )
    for rank, uuid in ((4, "GPU-a"), (5, "GPU-b")):
        write(run.rank_dir(2, rank), {"kind": "rank", "rank": rank, "device_uuid": uuid})
    assert xids_by_rank(run, 2, 0, {0: 4, 1: 5}) == {1: 79}
    assert log_tail(tmp_path / "no.log") == ""
