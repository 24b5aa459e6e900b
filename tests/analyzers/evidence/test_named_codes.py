"""Advice and meaning that go with a line's own wording: fabric manager, a silent GPU, a quota, CANN's codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

RAISED = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in main\n    step()\n{error}\n'


@pytest.mark.parametrize(
    ("error", "cause", "advice"),
    [
        ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
         "device_setup", "fabric manager"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk_full", "quota -s"),
        ("OSError: [Errno 28] No space left on device", "disk_full", "Free space"),
        ("safetensors_rust.SafetensorError: Error while serializing: I/O error: Operation not permitted (os error 1)",
         "file_system", "Check that mount"),
        ('SafetensorError: Error while serializing: IoError(Os { code: 5, kind: Uncategorized, message: "x" })',
         "file_system", "Check that mount"),
        ('SafetensorError: Error while serializing: IoError(Os { code: 28, message: "No space left on device" })',
         "disk_full", "Free space"),
        ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooSmall", "checkpoint_damaged",
         "previous checkpoint"),
        ("ValueError: Error while serializing: IoError of the reward's text", "exception", "Check job/train"),
        ("OSError: [Errno 16] Device or resource busy: '/home/a/.cache/k/tmp' -> '/home/a/.cache/k/b'", "file_system",
         "Check that mount"),
        ("OSError: No such device (os error 19)", "file_system", "Check that mount"),
        ("botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the UploadPart operation (reached "
         "max retries: 4): Please reduce your request rate.", "download", "rate limits"),
        ("botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL: 'https://s3.x/b'",
         "download", "route from that node"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "device_error", "compute-sanitizer"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "device_error", "Drain the node"),
        ("requests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://hub/x", "download", "log in"),
        ("ImportError: /env/ext_cuda.cpython-311.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
         "version_mismatch", "built for another version of torch"),
        ("ImportError: /env/ext_cuda.cpython-311.so: undefined \nsymbol: _ZN3c104cuda9SetDeviceEi",
         "version_mismatch", "built for another version of torch"),
        ("python: symbol lookup error: /env/ext.so: undefined symbol: _ZN2at4_ops5zeros", "version_mismatch",
         "built for another version of torch"),
        ("ImportError: /env/torch/lib/libtorch_cuda.so: undefined symbol: ncclAlltoAll", "version_mismatch",
         "LD_LIBRARY_PATH"),
        ("RuntimeError: HIP error: invalid device function", "version_mismatch", "architecture"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "version_mismatch",
         "architecture"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "version_mismatch",
         "update the driver"),
        ("RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version", "version_mismatch",
         "update the driver"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "exception",
         "memory is full"),
        ("RuntimeError: NPU function error: AclrtSynchronizeStreamWithTimeout(s), error code is 507035",
         "device_error", "errorStr"),
    ],
)  # fmt: skip
def test_each_wording_of_a_cause_has_its_own_advice(tmp_path: Path, error: str, cause: str, advice: str) -> None:
    first = diagnosed(tmp_path, "job.log", RAISED.format(error=error)).fired[0]
    assert first.cause == cause
    assert advice in next_step(first)


def test_a_gpu_that_nvidia_smi_cannot_open_is_a_device_error(tmp_path: Path) -> None:
    text = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n"
    first = diagnosed(tmp_path, "smi.txt", text).fired[0]
    assert (first.cause, "3B:00.0" in first.summary) == ("device_error", True)
    assert "reset the GPU" in next_step(first)


def test_a_runtime_error_code_is_reported_with_its_meaning(tmp_path: Path) -> None:
    error = "RuntimeError: NPU function error: AclrtSynchronizeStreamWithTimeout(s), error code is 507035"
    assert "507035: vector core exception" in diagnosed(tmp_path, "job.log", RAISED.format(error=error)).verdict


def test_an_hccl_error_code_is_reported_with_its_meaning_and_no_rank(tmp_path: Path) -> None:
    text = "[rank1]: EI0006: [PID: 7] Getting socket times out. Remote Rank did not send the data\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert "EI0006: no socket to another rank within the timeout" in first.summary
    assert first.ranks == ()


def test_a_fatal_error_of_a_switch_is_named_and_others_are_not(tmp_path: Path) -> None:
    text = "[  9.1] nvidia-nvswitch3: open (major=509)\n[ 10.2] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): {error}\n"
    quiet = diagnosed(tmp_path, "a.txt", text.format(error="12028, Non-fatal, Link 45 egress non-posted PRIV error"))
    assert quiet.fired == ()
    first = diagnosed(tmp_path, "a.txt", text.format(error="20034, Fatal, Link 30 LTSSM Fault Up")).fired[0]
    assert "An NVSwitch reported a fatal error: SXid 20034, Link 30 LTSSM Fault Up" in first.summary


def test_a_checkpoint_of_another_vocabulary_is_named_with_the_parameter_and_blames_no_rank(tmp_path: Path) -> None:
    error = (
        "RuntimeError: Error(s) in loading state_dict for Model:\n\tsize mismatch for embed.weight: copying a param "
        "with shape torch.Size([99, 8]) from checkpoint, the shape in current model is torch.Size([96, 8])."
    )
    text = "".join(f"[rank1]: {line}\n" for line in RAISED.format(error=error).splitlines())
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("checkpoint_differs", ())
    assert "size mismatch for embed.weight" in first.summary


def test_a_pod_that_failed_is_named_by_its_operator(tmp_path: Path) -> None:
    text = "1.7085e+09\tDEBUG\tevents\tPod: team.job-worker-3 exited with code 1\t{}\n"
    first = diagnosed(tmp_path, "operator.log", text).fired[0]
    assert (first.cause, first.ranks) == ("exit", ())
    assert "A process of job-worker-3 ended with exit code 1" in first.summary


# ---- calls and addresses ----

TIMEOUT = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=BROADCAST, NumelIn=64, "
)
TIMEOUT += "NumelOut=64, Timeout(ms)=600000) ran for 600030 milliseconds before timing out.\n"


def test_the_rank_in_a_message_repeated_by_terminate_is_the_rank_of_the_call(tmp_path: Path) -> None:
    text = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 6] NCCL watchdog "
    text += "thread terminated with exception: " + TIMEOUT.format(rank=6)
    verdict = diagnosed(tmp_path, "job.log", text).verdict
    assert "Rank 6 waited in BROADCAST #9 of 64 elements" in verdict
    assert "ranks 0-5 printed nothing in these files" in verdict


def test_ranks_of_a_node_without_a_log_are_asked_for_before_the_network_is_blamed(tmp_path: Path) -> None:
    text = "".join(f"[rank{rank}]:[E501 08:30:00.1 ProcessGroupNCCL.cpp:607] {TIMEOUT.format(rank=rank)}"
                   for rank in range(8, 16))  # fmt: skip
    first = diagnosed(tmp_path, "node1.log", text).fired[0]
    assert (first.cause, first.ranks) == ("all_entered", ())
    assert "ranks 0-7 printed nothing" in first.summary
    assert "no rank is missing" not in next_step(first)


@pytest.mark.parametrize(
    "text",
    [
        RAISED.format(error="RuntimeError: [gloo/tcp/pair.cc:761] connect [127.0.1.1]:4711: Connection refused"),
        "Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback.\n"
        + RAISED.format(error="RuntimeError: Gloo connectFullMesh failed with [gloo/tcp/pair.cc:152] timed out "
                              "connecting: Connection refused, remote=[127.0.0.1]:14215"),
    ],
)  # fmt: skip
def test_gloo_on_a_hosts_own_address_is_the_wrong_interface(tmp_path: Path, text: str) -> None:
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("no_interface", ())
    assert "GLOO_SOCKET_IFNAME" in next_step(first)
    assert "^" not in next_step(first)  # gloo takes names only; NCCL alone can exclude some


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
def test_a_loss_scale_that_is_constant_or_recovers_is_not_exhausted(tmp_path: Path, values: list[float]) -> None:
    assert diagnosed(tmp_path, "job.log", scales(values)).fired == ()


def test_a_scaler_that_goes_below_one_is_exhausted(tmp_path: Path) -> None:
    text = scales([8.0]) + "".join(
        f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {scale}\n"
        for scale in ("1.0", "0.5", "0.25", "2.9e-39")
    )
    assert "loss scale is exhausted" in diagnosed(tmp_path, "job.log", text).verdict


# ---- launchers, and parts of libraries ----


def test_an_error_signed_by_its_library_names_that_rank_in_a_cut_traceback(tmp_path: Path) -> None:
    text = "    work = group.barrier()\nRuntimeError: [ERROR] HCCL error in: torch_npu/ProcessGroupHCCL.cpp:64\n"
    text += "[ERROR] 2026-01-07-09:12:44 (PID:4711, Device:5, RankID:5) ERR02200 DIST call hccl api failed.\n"
    text += "EJ0001: 2026-01-07-09:12:44.1 Failed to initialize the HCCP process. Reason: the last one runs.\n\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.ranks) == ("device_setup", (5,))


@pytest.mark.parametrize(("signal", "is_hangup"), [("1", True), ("Signals.SIGHUP", True), ("Signals.SIGTERM", False)])
def test_a_closed_terminal_is_distinguished_from_other_signals(tmp_path: Path, signal: str, is_hangup: bool) -> None:
    text = f"W0301 10:00:00.1 77 torch/distributed/elastic/agent/server/api.py:704] Received {signal} death signal, "
    first = diagnosed(tmp_path, "job.log", text + "shutting down workers\n").fired[0]
    assert (first.cause, first.ranks) == ("cancelled", ())
    assert ("SIGHUP" in first.summary, "tmux" in next_step(first)) == (is_hangup, is_hangup)


COMMAND = "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=1 --rdzv_backend=c10d --rdzv_endpoint=gpu-01:29500 "
COMMAND += "--rdzv_id=colossalai-default-job pretrain.py --config big.yaml"


def test_a_node_that_colossalai_could_not_log_in_to_is_named_with_the_reason(tmp_path: Path) -> None:
    text = f"Error: failed to run {COMMAND} on gpu-02, is localhost: False, exception: {{reason}}\n"
    first = diagnosed(tmp_path, "job.log", text.format(reason="Private key file is encrypted")).fired[0]
    assert (first.cause, first.ranks) == ("launch_failed", ())
    assert "on a node (gpu-02): Private key file is encrypted" in first.summary
    ended = diagnosed(tmp_path, "job.log", text.format(reason="Encountered a bad command exit code!")).fired
    assert all(finding.cause != "launch_failed" for finding in ended)  # the program ran there


def test_the_node_that_mindspores_scheduler_gave_up_is_suspected(tmp_path: Path) -> None:
    text = (
        "[ERROR] ME(9:28,MainProcess):2026-01-07-09:40:38.722 [mindspore/parallel/cluster/process_entity/_api.py:431] "
    )
    first = diagnosed(tmp_path, "job.log", text + "Time out nodes are ['6']\n").fired[0]
    assert (first.cause, first.ranks, first.status) == ("connection_lost", (6,), "suspect")


@pytest.mark.parametrize(("scale", "is_told"), [("0.00048828125", True), ("0.0625", False)])
def test_a_loss_scale_near_the_minimum_of_fairseq_is_reported_before_its_error(
    tmp_path: Path, scale: str, is_told: bool
) -> None:
    text = "2026-03-01 11:41:18 | INFO | fairseq.trainer | NOTE: overflow detected, setting loss scale to: {scale}\n"
    found = diagnosed(tmp_path, "job.log", text.format(scale=scale)).fired
    assert [scale in finding.summary for finding in found] == [True] * is_told


@pytest.mark.parametrize(
    ("file", "part", "variable"),
    [
        ("transport/nvls.cc:254", "NVLink SHARP", "NCCL_NVLS_ENABLE"),
        ("transport/p2p.cc:601", "P2P", "NCCL_P2P_DISABLE"),
    ],
)
def test_the_failed_part_of_nccl_is_named_with_the_variable_that_disables_it(
    tmp_path: Path, file: str, part: str, variable: str
) -> None:
    text = f"gpu-07:811:902 [3] {file} NCCL WARN Cuda failure 1 'invalid argument'\n"
    text += "gpu-07:811:902 [3] NCCL INFO init.cc:1157 -> 1\n"
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (first.cause, first.status, first.ranks) == ("nccl_error", "suspect", ())
    assert part in first.summary
    assert variable in next_step(first)


@pytest.mark.parametrize("error", ["peer access is not supported between these two devices",
                                   "peer mapping resources exhausted"])  # fmt: skip
def test_a_cuda_error_of_peer_access_names_the_variable_that_disables_it(tmp_path: Path, error: str) -> None:
    text = RAISED.format(
        error="torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled cuda error, NCCL "
        f"2.21.5\nncclUnhandledCudaError: Call to CUDA failed.\nLast error:\nCuda failure 217 '{error}'"
    )
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert first.summary.startswith(
        f"NCCL could not set up direct access between GPUs (P2P): Cuda failure 217 '{error}'"
    )
    assert "NCCL_P2P_DISABLE=1" in next_step(first)


def test_a_network_plugin_that_cannot_open_its_device_does_not_suggest_checking_cables(tmp_path: Path) -> None:
    text = (
        "nid7:71:90 [0] open_ep:80 NCCL WARN NET/OFI Couldn't open a fabric provider. RC: -38, ERROR: Not implemented\n"
    )
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert first.cause == "infiniband"
    assert "fi_info" in next_step(first)
    assert "ibstat` and the switch" not in next_step(first)


def test_an_actor_handle_of_another_ray_job_is_not_the_cause(tmp_path: Path) -> None:
    text = RAISED.format(error="ray.exceptions.ActorHandleNotFoundError: created in job 01, but the current job is 02")
    text += RAISED.format(error="ValueError: the reward of sample 17 is empty")
    first = diagnosed(tmp_path, "job.log", text).fired[0]
    assert "ValueError" in first.summary
