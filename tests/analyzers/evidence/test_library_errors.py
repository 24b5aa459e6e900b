"""Errors of communication libraries as other programs quote them: NCCL's texts, HCCL's codes in both of its formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in main\n    step()\n{error}\n'


def of_rank(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "error",
    [
        "horovod.common.exceptions.HorovodInternalError: ncclAllReduce failed: unhandled system error",
        "horovod.common.exceptions.HorovodInternalError: ncclCommInitRank failed: internal error",
        "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: NCCL operation ncclCommInitRank(&comm, 8, id, 0) failed: "
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details).",
        "cupy_backends.cuda.libs.nccl.NcclError: NCCL_ERROR_SYSTEM_ERROR: unhandled system error",
        "tensorflow.python.framework.errors_impl.InternalError: NCCL: unhandled system error. Set NCCL_DEBUG=WARN.",
        "xgboost.core.XGBoostError: [10:01:12] /w/nccl_device_communicator.cuh:120: NCCL failure: invalid usage",
    ],
)
def test_an_error_of_nccl_blames_no_rank_whoever_quotes_it(tmp_path: Path, error: str) -> None:
    text = of_rank(1, RAISED.format(error=error)) + of_rank(0, RAISED.format(error=error))
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks, first.status) == ("nccl_error", (), "suspect")


def test_the_failed_transfer_that_nccl_reports_explains_horovods_error(tmp_path: Path) -> None:
    error = "tensorflow.python.framework.errors_impl.UnknownError: ncclAllReduce failed: unhandled system error"
    warning = "node1:94:98 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0"
    text = f"[1,1]<stdout>:{warning}, vendor err 129\n"
    text += "".join(f"[1,1]<stderr>:{line}\n" for line in RAISED.format(error=error).splitlines())
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("infiniband", ())


@pytest.mark.parametrize(
    ("place", "part"),
    [("init.cc:416", "the driver or the virtual GPU lacks"), ("transport/nvls.cc:254", "NVLink SHARP")],
)
def test_a_feature_that_the_driver_lacks_is_named(tmp_path: Path, place: str, part: str) -> None:
    text = f"gpu1:9:12 [0] {place} NCCL WARN Cuda failure 'operation not supported'\n"
    error = "torch.distributed.DistBackendError: NCCL error in: x.cpp:7, unhandled cuda error"
    text += of_rank(0, RAISED.format(error=error))
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert part in first.summary


HCCL = """RuntimeError: create_config:torch_npu/compiler_depend.ts:102 HCCL function error: hcclCommInitRootInfoConfig, error code is 7
[ERROR] 2026-04-24-16:14:56 (PID:46, Device:0, RankID:2) ERR02200 DIST call hccl api failed.
"""  # noqa: E501
FORMATS = ("{code}: [PID: 46] 2026-04-24-16:14:56.9 {text}", "[PID: 46] 2026-04-24-16:14:56.9 A_Title({code}): {text}")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("code", "text", "cause"),
    [
        ("EI0004", "Failed to parse the ranktable file /job/table.json. Reason: no such file", "rendezvous"),
        ("EI0005", "The parameters of operator AllReduce are inconsistent between ranks, parameter count", "mismatch"),
        ("EI0006", "Getting socket times out. Reason: the peer is late", "connection_lost"),
        ("EI0008", "The cann-hcomm versions are inconsistent. The local 8.0, the remote 8.1.", "version_mismatch"),
        ("EI0009", "Device 3 transport init error. Reason: The network port is down.", "infiniband"),
        ("EI0011", "Failed to allocate 2097152 bytes of NPU memory.", "out_of_memory"),
        ("EI0013", "An error CQE occurred during operator execution. Local information: server 10.0.0.9", "infiniband"),
        ("EI0019", "Failed to enable listening. Reason: IP address 10.0.0.9 and port 5001 have already been bound.",
         "port_in_use"),
        ("EJ0003", "Failed to bind the IP port. Reason: IP address and port have been bound already.", "port_in_use"),
    ],
)  # fmt: skip
def test_a_code_of_hccl_names_the_cause_below_torch_npus_error(
    tmp_path: Path, form: str, code: str, text: str, cause: str
) -> None:
    error = RAISED.format(error=HCCL + form.format(code=code, text=text))
    first = diagnosed(tmp_path, "job.log", of_rank(2, error)).fired[0]
    assert first.cause == cause
    assert first.ranks == ((2,) if cause == "out_of_memory" else ())


def test_the_ranks_that_hccl_lists_as_unconnected_are_in_the_sentence(tmp_path: Path) -> None:
    listed = 'No rank can connect to the root node within the timeout period. List of unconnected ranks: "[1,7,]".'
    error = RAISED.format(error=HCCL + FORMATS[1].format(code="EI0015", text=f"Failed to collect. Reason: {listed}"))
    first = diagnosed(tmp_path, "job.log", of_rank(2, error)).fired[0]
    assert (first.cause, first.status, first.ranks) == ("rendezvous", "suspect", ())
    assert first.summary.startswith("Ranks 1 and 7 of a communicator did not reach its first rank in time")
    assert "HCCL_SOCKET_IFNAME" in next_step(first)


def in_nccl(kind: str) -> str:
    error = f"torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled {kind} error, NCCL 2.21.5"
    return of_rank(2, RAISED.format(error=error))


LINKS = "gpu4:70:91 [2] misc/topo.cc:204 NCCL WARN Unable to read the links of device 2\n"


def test_the_call_that_nccl_warns_of_is_quoted_with_its_error(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, "job.log", LINKS + in_nccl("system")).fired[0]
    assert (first.cause, first.status) == ("nccl_error", "suspect")
    assert 'NCCL warns of "Unable to read the links of device 2" (job.log:1)' in first.summary
    assert "NCCL_DEBUG=WARN" not in next_step(first)  # the log has those warnings already


def test_a_warning_of_a_transport_names_that_part(tmp_path: Path) -> None:
    warned = "gpu4:70:91 [2] transport/p2p.cc:411 NCCL WARN Could not open CUDA IPC handle : failed with 217\n"
    first = diagnosed(tmp_path, "job.log", warned + in_nccl("cuda")).fired[0]
    assert first.cause == "nccl_error"
    assert first.summary.startswith("NCCL could not set up direct access between GPUs (P2P): Could not open CUDA IPC")
    assert "NCCL_P2P_DISABLE=1" in next_step(first)


def test_a_warning_after_which_the_job_trained_on_is_not_quoted(tmp_path: Path) -> None:
    steps = "".join(f"step {step} loss 2.{step}\n" for step in range(1, 60))
    first = diagnosed(tmp_path, "job.log", LINKS + steps + in_nccl("system")).fired[0]
    assert first.cause == "nccl_error"
    assert "Unable to read" not in first.summary


SO = "/home/u/.cache/torch_extensions/py310_cu121/fused_adam/fused_adam.so: "


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_ranks_that_miss_an_extension_did_not_fail_to_build_it(tmp_path: Path, order: tuple[int, ...]) -> None:
    missing = f"ImportError: {SO}cannot open shared object file: No such file or directory"
    errors = {0: "RuntimeError: Error building extension 'fused_adam'", 1: missing, 2: missing}
    text = "".join(of_rank(rank, RAISED.format(error=errors[rank])) for rank in order)
    assert [one.ranks for one in diagnosed(tmp_path, "job.log", text).fired] == [(0,)]
    alone = diagnosed(tmp_path, "job.log", of_rank(1, RAISED.format(error=missing))).fired[0]
    assert (alone.cause, alone.ranks) == ("exception", (1,))
    assert "TRITON_CACHE_DIR" not in next_step(alone)


@pytest.mark.parametrize(("error", "is_raced"), [
    ("FileNotFoundError: [Errno 2] No such file or directory: '/home/u/.triton/cache/c1/f.ttir.tmp.pid_1_3'", True),
    ("OSError: [Errno 116] Stale file handle: '/home/u/.triton/cache/c1/f.json'", True),
    (f"ImportError: {SO}file too short", True),
    ("ImportError: /home/u/.triton/cache/7N/launcher.so: cannot stat shared object: Stale file handle", True),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/tmp/torchinductor_u/ab/cab.py'", False),
    ("OSError: [Errno 116] Stale file handle: '/home/u/data.bin'", False),
])  # fmt: skip
def test_a_cache_of_compiled_code_that_nodes_share_is_advised_to_be_local(
    tmp_path: Path, error: str, is_raced: bool
) -> None:
    first = diagnosed(tmp_path, "job.log", of_rank(5, RAISED.format(error=error))).fired[0]
    assert first.ranks == (5,)
    assert ("TRITON_CACHE_DIR" in next_step(first)) is is_raced


OBJECT = "RuntimeError: unable to open shared memory object </torch_29_13> in read-write mode"


@pytest.mark.parametrize(("error", "cause", "step"), [
    (f"{OBJECT}: No such file or directory (2)", "exception", "enable-linger"),
    ("RuntimeError: could not unlink the shared memory file /torch_4_7 : No such file or directory (2)", "exception",
     "enable-linger"),
    (f"{OBJECT}: Too many open files (24)", "too_many_files", "ulimit -n"),
    (OBJECT, "shared_memory", "--shm-size"),
    ("RuntimeError: unable to resize file </torch_29_13> to the right size: No space left on device (28)",
     "shared_memory", "--shm-size"),
])  # fmt: skip
def test_an_object_that_is_gone_from_shared_memory_is_not_a_lack_of_it(
    tmp_path: Path, error: str, cause: str, step: str
) -> None:
    first = diagnosed(tmp_path, "job.log", of_rank(3, RAISED.format(error=error))).fired[0]
    assert (first.cause, first.ranks) == (cause, (3,))
    assert step in next_step(first)


def test_bitsandbytes_without_a_build_for_this_cuda_is_a_mismatch_of_the_job(tmp_path: Path) -> None:
    error = (
        "RuntimeError: \n        CUDA Setup failed despite GPU being available. Inspect the CUDA SETUP outputs above!\n"
        "        If you suspect a bug, please open an issue."
    )
    text = of_rank(0, RAISED.format(error=error)) + of_rank(1, RAISED.format(error=error))
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("version_mismatch", ())
    assert "python -m bitsandbytes" in next_step(first)
