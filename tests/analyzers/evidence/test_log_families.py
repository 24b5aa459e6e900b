"""Wordings of the producers (torch, NCCL, CUDA, HIP, XLA, launchers, schedulers), by family: cause and rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.logs.rules import cause_of

CAUSES = {
    "rendezvous": (
        "socket.gaierror: [Errno -2] Name or service not known",
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR",
        "RuntimeError: Failed to get cluster ID from GCS server: TimedOut: Timed out while waiting for GCS",
        "NCCL WARN socketFinalizeAccept: wrong magic 4e1b != 7d22",
        "bootstrap.cc:131 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in",
        "ValueError: host not found: Name or service not known",
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (a, 1) cannot be retrieved (gai error: -3 - Temporary "
        "failure in name resolution).",
        "DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.",
        "ssh: Could not resolve hostname gpu-7: Name or service not known",
        "DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register::0.",
    ),
    "out_of_memory": (
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.56 GB)",
        "ValueError: 4.00 GiB KV cache is needed, which is larger than the available KV cache memory (2.13 GiB)",
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 128.00M. That was not possible.",
        "RuntimeError: XPU out of memory. Tried to allocate 2 GiB",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "ResourceExhaustedError: OOM when allocating tensor with shape[64,512]",
    ),
    "device_setup": (
        "RuntimeError: CUDA error: initialization error",
        "NCCL WARN Cuda failure 'CUDA driver is a stub library'",
        "RuntimeError: synStatus=20 [Device already acquired] Device acquire failed.",
        "ABORTED: The TPU is already in use by process with pid 71.",
        "NeuronCore(s) not available - Requested:32 Available:0",
        "Failed to initialize NVML: Driver/library version mismatch",
        "RuntimeError: Found no NVIDIA driver on your system.",
        "Error 802: system not yet initialized (Triggered internally at c10/cuda/CUDAFunctions.cpp:109.)",
        "nv-fabricmanager[88]: fabric manager NVIDIA GPU driver interface version 535.1 don't match with driver "
        "version 550.2.",
    ),
    "device_error": (
        "RuntimeError: cuDNN error: CUDNN_STATUS_MAPPING_ERROR",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle)`",
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016",
        "HW Exception by GPU node-2 (Agent handle: 0x55) reason :GPU Hang",
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
        "NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout(stream), error code is 507035",
        "rtDeviceSynchronizeWithTimeout execute failed, reason=[vector core exception][FUNC:FuncErrorReason]",
    ),
    "version_mismatch": (
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS",
        "ptxas fatal   : Value 'sm_120' is not defined for option 'gpu-name'",
        "RuntimeError: operator torchvision::nms does not exist",
        "Could not load library libcudnn_cnn_infer.so.8. Error: libnvrtc.so: cannot open shared object file",
        "RuntimeError: HIP error: invalid device function",
        "hipErrorNoBinaryForGpu: Unable to find code object for all current devices!",
        "ImportError: libtorch_cuda.so: undefined symbol: ncclCommRegister",
        "The NVIDIA driver on your system is too old (found version 11040).",
    ),
    "file_system": (
        "OSError: [Errno 37] No locks available",
        "OSError: [Errno 110] Connection timed out: '/mnt/ceph/a.bin'",
        "OSError: [Errno 524] Unknown error 524: '/nfs/x'",
        "OSError: [Errno 116] Stale file handle: '/nfs/data/shard-7'",
        "OSError: [Errno 5] Input/output error",
        "RuntimeError: write(): fd 31 failed with Input/output error",
        "OSError: [Errno 30] Read-only file system: '/ckpt/step-9'",
        "OSError: [Errno 107] Transport endpoint is not connected: '/gcs/data'",
    ),
    "too_many_processes": (
        "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 5 of 64: Resource temporarily unavailable",
    ),
    "download": (
        "httpx.ConnectError: [Errno -3] Temporary failure in name resolution",
        "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://example.org/x",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries "
        "exceeded with url: /a (Caused by NameResolutionError: Temporary failure in name resolution)",
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file",
    ),
    "device_assert": (
        "IndexKernel.cu:92: operator(): block: [1,0,0], thread: [7,0,0] Assertion `index < n` failed.",
        "RuntimeError: CUDA error: device-side assert triggered",
    ),
    "infiniband": (
        "NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",
        "NCCL WARN NET/OFI Only EFA provider is supported",
        "mlx5: gpu-7: got completion with error:",
        "NCCL WARN NET/IB : Got completion from peer 10.0.0.3<41> with status=12",
    ),
    "data_worker": (
        "RuntimeError: Pin memory thread exited unexpectedly",
        "RuntimeError: One of the subprocesses has abruptly died during map operation.",
        "SystemError: (Fatal) DataLoader process (pid 1104) exited is killed by signal: Killed.",
    ),
    "checkpoint_damaged": (
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "zipfile.BadZipFile: File is not a zip file",
    ),
    "too_many_files": (
        "RuntimeError: unable to open shared memory object </torch_71> in read-write mode: Too many open files (24)",
    ),
    "shared_memory": (
        "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-4Vn1 (size 9637888)",
        "ray.exceptions.ObjectStoreFullError: Failed to put object ff01 in object store because it is full.",
    ),
    "mismatch": (
        "NCCL WARN NET/Socket : peer 10.0.0.2<3> message truncated : receiving 65536 bytes instead of 32768",
    ),
    "port_denied": (
        "torch.distributed.DistNetworkError: The server socket has failed to bind to 0.0.0.0:80 (errno: 13 - "
        "Permission denied).",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 500, useIpv6: false, code: -13, name: EACCES, message: permission denied",
        "PermissionError: [Errno 13] Permission denied: ('0.0.0.0', 80)",
    ),
    "port_in_use": (
        "RuntimeError: Address already in use",
        "errno: 98 - EADDRINUSE",
        "ConnectionError: Tried to launch communication on port `29500`, but another process is utilizing it.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("cause", "text"), [(cause, text) for cause, texts in CAUSES.items() for text in texts])
def test_a_wording_has_its_cause(cause: str, text: str) -> None:
    rule = cause_of(text)
    assert rule is not None
    assert rule.cause == cause


@pytest.mark.parametrize("text", [
    "RuntimeError: CUDA error: invalid argument", "RuntimeError: HIP error: invalid argument",
    "KeyError: 'label'", "train: lib.cc:7: int f(): Assertion `n > 0' failed.", "ValueError: Stale configuration",
])  # fmt: skip
def test_a_text_without_a_known_cause_has_none(text: str) -> None:
    assert cause_of(text) is None


RANKED = {
    "[rank0]: RuntimeError: [Rank 0]: Ranks 6 failed to pass monitoredBarrier in 1800000 ms\n": ("not_entered", (6,)),
    "Exception in device=TPU:4: RESOURCE_EXHAUSTED: Attempting to reserve 5.9G at the bottom of memory.\n":
        ("out_of_memory", (4,)),
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for "
    "remainder of ranks for more than 60 seconds. This may indicate a deadlock.\nMissing ranks:\n1: [grad.a, grad.b]\n":
        ("not_entered", (1,)),
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 3 PID 771 RUNNING AT gpu-02\n"
    "=   KILLED BY SIGNAL: 11 (Segmentation fault)\n": ("signal", (3,)),
    "[rank2]: terminate called after throwing an instance of 'c10::Error'\n"
    "[rank2]:   what():  CUDA error: an illegal memory access was encountered\n": ("device_error", (2,)),
    "[rank1]: Fatal Python error: Segmentation fault\n[rank1]: \n"
    "[rank1]: Current thread 0x1 (most recent call first):\n": ("signal", (1,)),
    "(VllmWorker rank=5 pid=77) ERROR 07-23 19:34:51 [w.py:487] Traceback (most recent call last):\n"
    "(VllmWorker rank=5 pid=77) ERROR 07-23 19:34:51 [w.py:487]   File \"/job/a.py\", line 1, in f\n"
    "(VllmWorker rank=5 pid=77) ERROR 07-23 19:34:51 [w.py:487] KeyError: 'x'\n": ("exception", (5,)),
    "./run.sh: line 7:  4711 Killed                  python train.py\n": ("signal", ()),
    "slurmstepd: error: Exceeded job memory limit at some point.\n": ("host_out_of_memory", ()),
    "FloatingPointError: Loss became infinite or NaN at iteration=41!\n": ("unknown", ()),
    "submitit WARNING (2026-07-12 04:18:45,881) - Caught signal SIGHUP on n0293: this job is preempted.\n":
        ("preempted", ()),
    "=>> PBS: job killed: walltime 3610 exceeded limit 3600\n": ("time_limit", ()),
    "slurmstepd: error: execve(): /tmp/slurmd/job89/slurm_script: No such file or directory\n": ("launch_failed", ()),
    "[0]<stderr>:RuntimeError: stop at epoch 1\n[0]<stderr>:Killed\n"
    "[1]<stderr>:  what():  Read error [10.0.0.1]:3977: Connection reset by peer\n"
    "Process 0 exit with status code 137.\nProcess 1 exit with status code 134.\n": ("signal", (0,)),
    "RuntimeError: Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
    "terminated. The first process to do so was:\nProcess name: 3\nExit code: 139\n": ("signal", (3,)),
    "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=71, name=python3, Ch 00000001 caused by previous Xid 149\n":
        ("device_error", ()),
    "HW Exception by GPU node-4 (Agent handle: 0x1ebc04e0) reason :GPU Hang\n"
    "E0902 15:10:49.013000 81 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -6) "
    "local_rank: 2 (pid: 84) of binary: python\n": ("device_error", (2,)),
    "bash: line 1: torchrun: command not found\n": ("launch_failed", ()),
    "ABORT!!! Out of all 4 trainers, the trainer process with rank=[3] was aborted. Please check its log.\n":
        ("exit", (3,)),
    "W1212 04:02:33.403934 71 init.cc:205] *** SIGSEGV (@0x0) received by PID 71 (TID 0x7f) from PID 0; stack trace:\n"
    "ABORT!!! Out of all 4 trainers, the trainer process with rank=[2] was aborted. Please check its log.\n":
        ("signal", (2,)),
    "trainer-1  | [rank1]: Traceback (most recent call last):\ntrainer-1  | [rank1]:   File \"a.py\", line 9, in f\n"
    "trainer-1  | [rank1]: KeyError: 'x'\ntrainer-0  | [rank0]: RuntimeError: Connection reset by peer\n":
        ("exception", (1,)),
    "2024-11-28T07:42:14.532Z | RuntimeError: CUDA error: an illegal memory access was encountered\n":
        ("device_error", ()),
    "INFO:tensorflow:ShutdownHook: lame workers found: HeartbeatManager(/job:worker/replica:0/task:0/device:CPU:0)\n":
        ("connection_lost", ()),
    'ERROR:torch.distributed.elastic.multiprocessing.errors.error_handler:{\n  "message": {\n    "message": '
    '"ValueError: bad: batch",\n    "extraInfo": {\n      "py_callstack": "Traceback",\n      "timestamp": "1"\n'
    "    }\n  }\n}\n": ("exception", ()),
    "ray.exceptions.RayActorError: the actor died\nThe actor is dead because its node has died. Node Id: 6f\n":
        ("node_failed", ()),
}  # fmt: skip


@pytest.mark.parametrize("text", RANKED, ids=lambda text: text.split("\n")[0][:50])
def test_a_line_names_its_rank_or_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.log").write_text(text)
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.cause, first.ranks) == RANKED[text]


def test_a_line_that_the_terminal_broke_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "RuntimeError: The server socket has failed to listen on any local network \naddress. The server socket has "
        "failed to bind to [::]:29600 (errno: 98 - Address\nalready in use).\n"
    )
    first = diagnose_files([tmp_path]).fired[0]
    assert first.cause == "port_in_use"
    assert "Address already in use" in first.summary


def test_the_line_after_a_line_as_wide_as_a_terminal_is_another(tmp_path: Path) -> None:
    error = "AssertionError: Loading a checkpoint for MP=1 but world size is 4"
    agent = "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 71 closing signal SIGTERM"
    (tmp_path / "job.log").write_text(f"{error}\n{error}\n{agent}\n")
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.cause, first.evidence["message"]) == ("exception", error.partition(": ")[2])


def test_a_message_is_quoted_by_the_line_that_names_the_cause(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        '[rank2]: Traceback (most recent call last):\n[rank2]:   File "a.py", line 2, in f\n'
        "[rank2]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\n"
        "[rank2]: Last error:\n[rank2]: Cuda failure 802 'system not yet initialized'\n"
    )
    assert "Cuda failure 802" in diagnose_files([tmp_path]).fired[0].summary


def test_lost_connections_without_any_rank_are_a_verdict(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "(train pid=9) RuntimeError: npuSynchronizeDevice:a.ts:479 NPU function error: time out, error code is 507048\n"
        "(train pid=9) EI0002: The wait execution of the Notify register times out in HcclAllreduce\n"
    )
    assert diagnose_files([tmp_path]).fired[0].ranks == ()


def test_advice_of_nccl_is_not_a_cause(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text('a:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Missing "iommu=pt" from kernel cmd\n')
    assert diagnose_files([tmp_path]).fired == ()


def test_a_warning_about_missing_ipv6_is_not_a_cause(tmp_path: Path) -> None:
    """torch prints it on every machine without IPv6, and goes on."""
    (tmp_path / "job.log").write_text(
        "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 "
        "(errno: 97 - Address family not supported by protocol).\n"
    )
    assert not diagnose_files([tmp_path]).fired


@pytest.mark.parametrize(
    "call",
    [
        "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000)",
        "WorkNCCL(SeqNum=15, OpType=ALLREDUCE, TensorShape=[1], Timeout(ms)=1800000)",
    ],
)
def test_a_timeout_of_an_older_torch_is_a_hang_without_a_culprit(tmp_path: Path, call: str) -> None:
    (tmp_path / "job.log").write_text(
        f"[E ProcessGroupNCCL.cpp:566] [Rank 3] Watchdog caught collective operation timeout: {call} "
        "ran for 1808499 milliseconds before timing out.\n"
    )
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.kind, first.cause, first.ranks, first.status) == ("hang", "all_entered", (), "suspect")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("ssh: connect to host gpu-7 port 22: Connection refused", "launch_failed"),
        ("MemoryError", "host_out_of_memory"),
        ("The node had condition: [DiskPressure].", "disk_full"),
        (
            "Reason:       Evicted\nMessage:      The node was low on resource: ephemeral-storage. Container a",
            "disk_full",
        ),
        ("Reason:       Evicted\nMessage:      Pod was rejected", "preempted"),
        ("[rank2]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 2] Heartbeat monitor timed out!", "watchdog_stuck"),
        ("TimeoutError: RPC call to sample_tokens timed out.", "all_entered"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "rendezvous"),
        ("s watchdog got stuck for 480 seconds without making progress, due to", "watchdog_stuck"),
        ("gpu-7: Test NCCL failure common.cu:959 'internal error - please report this issue'", "nccl_error"),
        ("The node 'a_1_0' has failed to send a keep-alive heartbeat to the rendezvous 'none'.", "connection_lost"),
    ],
)
def test_a_single_line_is_enough_for_its_cause(tmp_path: Path, text: str, cause: str) -> None:
    begin = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n'
    (tmp_path / "job.log").write_text(f"{begin if text == 'MemoryError' else ''}{text}\n")
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.cause, first.ranks) == (cause, ())


def test_an_assertion_that_each_thread_prints_is_quoted_once(tmp_path: Path) -> None:
    at = "IndexKernel.cu:92: operator(): block: [{block},0,0], thread: [{thread},0,0] Assertion `index < n` failed."
    threads = [at.format(block=1, thread=number) for number in range(40)]
    error = "RuntimeError: CUDA error: device-side assert triggered"
    (tmp_path / "job.log").write_text("\n".join([*threads, error, ""]))
    diagnosis = diagnose_files([tmp_path / "job.log"])
    (lines,) = (finding.evidence["lines"] for finding in diagnosis.fired)
    assert sum("Assertion" in line for line in lines) == 1
    assert any(error in line for line in lines)


def _event(status: str, rank: int | None, error: object = None) -> str:
    about = {"run_id": "none", "global_rank": rank, "worker_id": "71", "role": "default", "hostname": "gpu-2",
             "state": status, "raw_error": json.dumps(error)}  # fmt: skip
    source = "AGENT" if rank is None else "WORKER"
    return json.dumps({"name": f"torchelastic.worker.status.{status}", "source": source, "timestamp": 0,
                       "metadata": about}) + "\n"  # fmt: skip


@pytest.mark.parametrize("before", ["", "INFO:torch.distributed.elastic.agent:[default] Starting worker group\n"])
def test_torchelastics_events_name_the_worker_that_failed(tmp_path: Path, before: str) -> None:
    path = tmp_path / "job.log"
    others = "".join(_event("TERMINATED", rank) for rank in (0, 1, 3))
    path.write_text(before + _event("FAILED", 2, {"message": "<NONE>"}) + others)
    first = diagnose_files([path]).fired[0]
    assert (first.cause, first.ranks, first.status) == ("exit", (2,), "suspect")
    callstack = 'Traceback (most recent call last):\n  File "/job/fit.py", line 9, in step\nValueError: no lane\n'
    raised = {"message": {"message": "ValueError: no lane", "extraInfo": {"py_callstack": callstack}}}
    path.write_text(before + _event("FAILED", 2, raised) + others)
    first = diagnose_files([path]).fired[0]
    assert (first.cause, first.ranks, first.evidence["raised_at"]) == ("exception", (2,), "job/fit.py:9 in step")
    path.write_text(before + _event("FAILED", 1) + _event("FAILED", 2))
    assert "Ranks 1 and 2 ended in an unknown order" in diagnose_files([path]).fired[0].summary
    path.write_text(before + "".join(_event("SUCCEEDED", rank) for rank in (0, 1, None)))
    assert "The job finished" in diagnose_files([path]).verdict


@pytest.mark.parametrize(
    "text",
    ["OSError: [Errno 27] File too large: '/ckpt/a.pt'", "RuntimeError: write(): fd 9: File too large"],
)
def test_a_file_above_the_size_limit_is_not_a_full_disk(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.log").write_text(f"{text}\n")
    first = diagnose_files([tmp_path]).fired[0]
    assert first.cause == "file_system"
    assert "`ulimit -f`" in first.evidence["do"]
