"""Ends that runtimes beside CUDA and NCCL report, and errors of drivers that end no job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analyzers.evidence.written import diagnosed

STEPS = "".join(f"step {number} loss {2 - number / 10:.2f}\n" for number in range(1, 4))
MISUSED = "OSError: (External) NCCL error(4), invalid argument.\n  [Hint: 'ncclInvalidArgument'. See the call.]\n"
OOMD = "systemd-oomd[77]: Killed /user.slice/job.scope due to memory pressure for /user.slice being 61% > 50% for > 20s"
PEERMEM = "nvidia-peermem nv_get_p2p_free_callback:131 ERROR detected invalid context, skipping further processing\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[n7:81:0:81] ib_mlx5_log.c:177  Transport retry count exceeded on mlx5_2:1/IB (synd 0x15)\n", "infiniband"),
        ("src/host/transport/transport.cpp:291: Unable to initialize any transports. returning error.\n", "infiniband"),
        ("src/host/transport/transport.cpp:420: non-zero status: 7 connect EPS failed\n", "infiniband"),
        ("2026-Mar-01 08:30:00 81:81 ERROR  TDRV:tdrv_get_dev_info  No neuron device available\n", "device_setup"),
        (MISUSED + "I0301 08:30:00.1 81 tcp_store.cc:257] receive shutdown event and so quit\n", "nccl_error"),
        (f"Mar  1 08:30:00 n7 {OOMD}\n", "host_out_of_memory"),
        ("Mar  1 08:30:00 n7 systemd[1]: job.scope: systemd-oomd killed 9 process(es) in this unit.\n",
         "host_out_of_memory"),
    ],
)  # fmt: skip
def test_a_runtimes_own_words_name_the_cause_and_no_rank(tmp_path: Path, text: str, cause: str) -> None:
    first = diagnosed(tmp_path, "job.log", STEPS + text).fired[0]
    assert (first.cause, first.ranks) == (cause, ())


@pytest.mark.parametrize("prefix", ["[ 8121.110241] ", "Mar  1 08:30:00 n7 kernel: ", "[Sun Mar  1 08:30:00 2026] "])
def test_an_error_that_a_driver_writes_and_continues_after_is_no_end(tmp_path: Path, prefix: str) -> None:
    assert not diagnosed(tmp_path, "dmesg.txt", prefix + PEERMEM).fired


def test_the_same_words_of_a_program_are_suspected(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", STEPS + "ERROR: detected invalid context in the loader\n").fired[0]
    assert (first.cause, first.status) == ("unnamed_error", "suspect")
