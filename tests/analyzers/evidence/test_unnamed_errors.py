"""Errors that no rule knows are quoted where nothing else says why the job ended, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import Diagnosis
from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.written import diagnosed

STEPS = "".join(
    f"[rank0]:[titan] 2026-03-01 10:00:{i:02d},120 - root - INFO - step: {i + 1}  loss: {9 - i / 10:.4f}  "
    "grad_norm: 1.1  memory: 9.66GiB(52.28%)  tps: 4,800  tflops: 272.00  mfu: 27.20%\n"
    for i in range(12)
)
STUCK = "E0301 10:00:40.101010    4410 ring_exchange.cc:310] Lane 3 did not settle within 12 turns\n"
LEVELS = (
    STUCK,
    "2026-03-01 10:00:40,101 ERROR lane 3 did not settle within 12 turns\n",
    "[2026-03-01 10:00:40] [CRITICAL] lane 3 did not settle within 12 turns\n",
    "level=error lane 3 did not settle within 12 turns\n",
    "laned: fatal: lane 3 did not settle within 12 turns\n",
    "F0301 10:00:40.101010    4410 ring.cc:31] Check failed: lane 3 did not settle within 12 turns\n",
)


def _first(diagnosis: Diagnosis) -> tuple[str, str, tuple[int, ...]]:
    finding = diagnosis.fired[0]
    return finding.cause or "", finding.status, tuple(finding.ranks)


@pytest.mark.parametrize("line", LEVELS)
def test_a_line_marked_as_an_error_is_quoted_as_a_suspicion(line: str, tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, "job.log", f"{STEPS}{line}")
    assert _first(diagnosis) == ("unnamed_error", "suspect", ())
    assert "did not settle within 12 turns" in diagnosis.verdict


@pytest.mark.parametrize(
    "text",
    [
        f"{STUCK}{STEPS}",  # the job went on
        f"{STEPS}2026-03-01 10:01:00 INFO Training finished\n{STUCK}",
        f"{STEPS}eval error: 0.312\nTop-1 error: 23.1\n",
        f"{STEPS}E0301 10:00:40.1 44 dnn.cc:83] Unable to register cuDNN factory: one has already been registered\n",
        f"{STEPS}2026-03-01 10:00:40,101 INFO error: none\n",
    ],
)
def test_a_job_that_goes_on_or_finished_gives_no_alarm(text: str, tmp_path: Path) -> None:
    assert not diagnosed(tmp_path, "job.log", text).fired


def test_an_error_before_a_lost_connection_is_reported_with_it(tmp_path: Path) -> None:
    lost = "[rank1]: RuntimeError: [../gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:4411\n"
    diagnosis = diagnosed(tmp_path, "job.log", f"{STUCK}{lost}")
    assert _first(diagnosis)[0] == "connection_lost"
    assert "Lane 3 did not settle" in diagnosis.verdict


def test_the_end_of_a_log_without_steps_is_quoted_and_accuses_nobody(tmp_path: Path) -> None:
    text = "reading plan\nopening lanes\nLane 3 is not responding (337 seconds)\n"
    diagnosis = diagnosed(tmp_path, "job.log", text)
    assert not diagnosis.fired
    assert 'ends with "Lane 3 is not responding (337 seconds)"' in diagnosis.verdict


NAMED = (
    # What programs say of their end, in the wording of their source: cause, ranks, words of the verdict.
    ("oneCCL: ofi.cpp:232 init: EXCEPTION: failed to initialize ATL", "no_interface", (), "failed to initialize ATL"),
    ("w-0:8:9 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
     "shared_memory", (), "/dev/shm"),
    ("slurmstepd: error: *** STEP 71.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TASK FAILURE ***\n"
     "srun: error: n1: tasks 0-4,6-7: Terminated", "exit", (5,), "task 5"),
    ("slurmstepd: error: *** STEP 71.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TASK FAILURE ***\n"
     "srun: error: n1: tasks 0-3,6-7: Terminated", "exit", (), "A task of the job failed"),
    ("t.cu:41: void run(Args) : Assertion `args.out != nullptr' failed.\nE0301 10:00:02.1 71 torch/distributed/elastic/"
     "multiprocessing/api.py:882] failed (exitcode: -6) local_rank: 2 (pid: 212) of binary: /usr/bin/python3",
     "signal", (2,), "args.out != nullptr"),
    ("RuntimeError: HCCL error in: ProcessGroupHCCL.cpp:64\nEJ0001: 2026-03-01 Failed to initialize the HCCP process.",
     "device_setup", (), "HCCP"),
    ("initializing ddp: GLOBAL_RANK: 0, MEMBER: 1/4\ninitializing ddp: GLOBAL_RANK: 1, MEMBER: 2/4", "rendezvous", (),
     "2 of 4 ranks"),
    ("GLOBAL_RANK: 0, MEMBER: 1/2\nGLOBAL_RANK: 0, MEMBER: 1/2", "rendezvous", (), "rank 0 began more than once"),
    ("ERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.", "signal", (2,), "SIGBUS"),
    ("Global rank 3 (PID 4413) exited with code -11", "signal", (3,), "SIGSEGV"),
    ("[10.5] amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!", "device_error",
     (), "0000:1c:00.0 reports an uncorrectable hardware error"),
    ("[72.1] habanalabs 0000:34:00.0: Failed to initialize hl6. Device is NOT usable !", "device_error", (),
     "0000:34:00.0 could not be started by its driver"),
    ("[84.3] NVRM: GPU3 _kgspLogRpcTimeout: ********* GSP Timeout *********", "device_error", (),
     "GPU 3 does not answer"),
    ("Training failed due to worker errors:\n[Rank 2 Error Snippet]:\n  File \"/job/fit.py\", line 9, in step\n"
     "    batch = next(loader)\nRuntimeError: DataLoader timed out after 90 seconds", "data_worker", (2,), "Rank 2"),
    ("Training failed due to worker errors:\n[Rank 0,3 Error Snippet]:\nTraceback (most recent call last):\n"
     '  File "/job/fit.py", line 9, in step\n    read(1)\nValueError: no shard', "exception", (0, 3), "no shard"),
    ("2026-Mar-01 10:00:43.0263 71:84 [27] bootstrap.cc:89 CCOM WARN Timeout waiting for incoming connection (90 s)",
     "nccl_error", (), "Timeout waiting for incoming connection"),
    ("terminate called after throwing an instance of 'ccl::v1::exception'\n  what():  oneCCL: ze_call.cpp:28 do_call: "
     "EXCEPTION: ze error at zeQueue, code: ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\nx19: rank 5 died from signal 6 and "
     "dumped core\nx19: rank 2 died from signal 15\n", "out_of_memory", (5,), "Rank 5 ran out of device memory"),
    ('Traceback (most recent call last):\n  File "/job/fit.py", line 9, in step\n    loss.cpu()\n'
     "RuntimeError: INTERNAL: From /job:c/task:0:\n2 root error(s) found.\n  (0) INTERNAL: Nrt::Load failed (2)\n"
     "  (1) INTERNAL: aborted", "exception", (), "raised RuntimeError: INTERNAL: Nrt::Load failed"),
    ("[Sun Mar  1 10:00:00 2026] nfs: server fs7 not responding, timed out", "file_system", (), "NFS server fs7"),
    ("2m  Normal  Killing  pod/train-0  Container trainer failed liveness probe, will be restarted", "cancelled", (),
     "probe failed"),
    ("Worker exit type: SYSTEM_ERROR Owner Ip address: 10.0.0.7 Owner's node has crashed.", "node_failed", (),
     "10.0.0.7"),
    ("Message:  Pod was terminated in response to imminent node shutdown.", "preempted", (),
     "took the job's nodes away"),
    ("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [4], but another sent [5].", "mismatch", (),
     "Mismatched ALLREDUCE"),
    ("n1:8:9 [0] net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129",
     "infiniband", (), "error 12"),
    ("[9.1] EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0)", "node_failed", (),
     "1 UE memory read error"),
    ("[Sun Mar  1 10:00:00 2026] watchdog: BUG: soft lockup - CPU#14 stuck for 26s! [python:4123]", "node_failed", (),
     "soft lockup"),
    ("botocore.exceptions.ConnectionClosedError: Connection was closed before we received a valid response from "
     'endpoint URL: "https://store.example/run"', "download", (), "save to a remote address"),
    ("ValueError: Error training job-7: Failed Reason: AlgorithmError: Exit Code: 139", "signal", (), "SIGSEGV"),
    ("EL0004: [PID: 553] 2026-03-01-04:55:13.065.712 Failed to allocate memory.", "out_of_memory", (), "device memory"),
    ("EZ9999: The error from device(0), serial number is 3, there is an aivec error, core id is 0, errorStr: Illegal",
     "device_error", (), "aivec error"),
    ("terminate called after throwing an instance of 'std::runtime_error'\n  what():  Lane 3 did not settle",
     "exception", (), "Lane 3 did not settle"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "cause", "ranks", "words"), NAMED)
def test_end_messages_of_programs_have_their_cause(
    text: str, cause: str, ranks: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    diagnosis = diagnosed(tmp_path, "job.log", f"{text}\n")
    assert (_first(diagnosis)[0], _first(diagnosis)[2]) == (cause, ranks)
    assert words in diagnosis.verdict


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("HW Exception by GPU node-2 (Agent handle: 0x1e) reason :GPU Hang", "amd-smi"),
        ("RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "xpu-smi"),
        ("RuntimeError: NPU function error: HBM MULTI BIT ECC, error code is 507054", "npu-smi"),
    ],
)
def test_a_device_error_suggests_the_tools_of_its_vendor(text: str, tool: str, tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, "job.log", f"{text}\n").fired
    assert finding.cause == "device_error"
    assert tool in finding.evidence["do"]
    assert "nvidia-smi" not in finding.evidence["do"]


def test_a_workers_own_error_is_named_and_not_that_it_was_raised_again(tmp_path: Path) -> None:
    text = """Traceback (most recent call last):
  File "train.py", line 41, in <module>
    for batch in loader:
RuntimeError: Caught KeyError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/env/site-packages/torch/utils/data/_utils/worker.py", line 178, in _worker_loop
    data = fetcher.fetch(index)
  File "/app/words.py", line 12, in __getitem__
    return self.table[word]
KeyError: 'aardvark'
"""
    verdict = diagnosed(tmp_path, "job.log", text).verdict
    assert "KeyError: 'aardvark' (in DataLoader worker process 3) (app/words.py:12 in __getitem__)" in verdict


def test_torch_npus_signature_names_the_rank(tmp_path: Path) -> None:
    text = """Traceback (most recent call last):
  File "train.py", line 14, in <module>
    main()
ValueError: the plan has no lane 7
[ERROR] 2026-03-01-11:57:54 (PID:927000, Device:3, RankID:3) ERR99999 UNKNOWN application exception
"""
    assert _first(diagnosed(tmp_path, "job.log", text))[2] == (3,)


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,mpirank:3,algo-1]<stderr>:",
        "[2026-03-01 10:00:03] node-b rank3: ",
        "node7 [rank3]: ",
        "rank3: ",
        "n-1/rank_3: ",
    ],
)
def test_prefixes_of_launchers_name_the_rank(prefix: str, tmp_path: Path) -> None:
    lines = ("Traceback (most recent call last):", '  File "t.py", line 2, in <module>', "ValueError: no lane 7")
    text = "".join(f"{prefix}{line}\n" for line in lines)
    assert _first(diagnosed(tmp_path, "job.log", text))[2] == (3,)


@pytest.mark.parametrize(
    "line",
    [
        "INFO:root:Epoch[0] Batch [{step}]\tSpeed: {rate:.2f} samples/sec\taccuracy=0.13",
        "Iter #{step}: {rate:.1f} img/sec per GPU",
        "ep 27 train, step {step}, ce 5.456, mem_usage:cuda:0 6.7GB, {seconds:.3f} sec/step",
    ],
)
def test_speeds_of_programs_that_print_no_loss_are_judged(line: str, tmp_path: Path) -> None:
    rows = [(step, 200.0 - step % 3 if step < 60 else 90.0 - step % 3) for step in range(120)]
    text = "".join(line.format(step=step, rate=rate, seconds=200 / rate) + "\n" for step, rate in rows)
    finding = diagnosed(tmp_path, "job.log", text).fired[0]
    assert (finding.kind, finding.severity) == ("throughput", "warning")
    assert 55 <= (finding.first_step or 0) <= 70


def test_shell_messages_before_the_launcher_do_not_explain_the_end(tmp_path: Path) -> None:
    started = "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default\n"
    error = "/usr/bin/curl: error: cannot resolve proxy.local\n"
    died = "failed (exitcode: -11) local_rank: 0 (pid: 410) of binary: /env/bin/python\n"
    (finding,) = diagnosed(tmp_path, "job.log", error + started + died).fired
    assert "proxy.local" not in finding.summary
    (finding,) = diagnosed(tmp_path, "job.log", started + error + died).fired
    assert "proxy.local" in finding.summary


def test_a_message_that_the_job_survived_before_is_not_its_end(tmp_path: Path) -> None:
    end = "E0301 10:00:40.101010    4410 reader.cc:194] GetNodes: Out of range: no more nodes\n"
    epochs = "".join(f"{STEPS}{end}" for _ in range(3))
    assert diagnosed(tmp_path, "job.log", epochs).fired == ()
    assert diagnosed(tmp_path, "job.log", epochs + STUCK).fired[0].cause == "unnamed_error"


@pytest.mark.parametrize("end", ["ERROR: reader 3: index 7 has no file", "OSError: index 7 has no file"])
def test_the_last_error_of_many_is_the_end(tmp_path: Path, end: str) -> None:
    many = "".join(f"ERROR: reader 3: index {i} is slow\nstep {i} loss {2 - i / 100:.2f} time 0.5\n" for i in range(60))
    (found,) = diagnosed(tmp_path, "job.log", f"{many}{end}\n").fired
    assert "index 7 has no file" in found.summary
    assert "The first error" not in found.summary


@pytest.mark.parametrize(
    ("line", "is_quoted"),
    [
        ("[rank1]: reader failed to open /data/7.bin", True),
        ("checked: no device errors found", False),
        ("skipping bad sample 7: KeyError('label')", False),
    ],
)
def test_a_failure_after_the_last_step_is_quoted(tmp_path: Path, line: str, is_quoted: bool) -> None:
    steps = "".join(f"step {i} loss {2 - i / 100:.2f} time 0.5\n" for i in range(20))
    verdict = diagnosed(tmp_path, "job.log", f"{steps}{line}\n").verdict
    assert verdict.startswith("The log ends in training")
    assert (f'ends with "{line}"' in verdict) == is_quoted
    assert ("No failure seen" in verdict) != is_quoted


GCC = "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/a.c', '-lcuda']' returned non-zero exit status 1."
BUILDS = [
    ("/usr/bin/ld: cannot find -lcuda\ncollect2: error: ld returned 1 exit status\n", GCC, "cannot find -lcuda"),
    ("/tmp/a.c:4:10: fatal error: Python.h: No such file or directory\ncompilation terminated.\n", GCC, "Python.h"),
    ("", "RuntimeError: Error building extension 'fused_adam': [1/2] c++ -c a.cpp -o a.o\nFAILED: a.o\na.cpp:3:10: "
     "fatal error: cuda_runtime.h: No such file or directory\nninja: build stopped: subcommand failed.", "cuda_ru"),
    ("", "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nCppCompileError: C++ compile error\n\n"
     "Output:\n/tmp/k.cpp:2:10: fatal error: vec.h: No such file or directory\ncompilation terminated.", "vec.h"),
]  # fmt: skip


@pytest.mark.parametrize(("output", "error", "stated"), BUILDS)
def test_a_failed_build_is_the_ranks_own_and_quotes_the_compiler(
    tmp_path: Path, output: str, error: str, stated: str
) -> None:
    text = 'Traceback (most recent call last):\n  File "/job/train.py", line 9, in main\n    step()\n' + error
    ranks = "".join(f"[rank{rank}]: {line}\n" for rank in (1, 0) for line in text.splitlines())
    first = diagnosed(tmp_path, "job.log", output + ranks).fired[0]
    assert (first.cause, first.status, first.ranks) == ("exception", "fired", (0, 1))
    assert f'The compiler reports "{stated}' in first.summary
    assert "headers of Python and CUDA" in next_step(first)


@pytest.mark.parametrize("program", ["/usr/bin/python3", "torchrun", "fairseq-train", "bash", "conda"])
def test_a_failed_command_that_starts_the_training_explains_nothing(tmp_path: Path, program: str) -> None:
    error = f"subprocess.CalledProcessError: Command '['{program}', '-u', 'x']' returned non-zero exit status 1."
    text = f'Traceback (most recent call last):\n  File "/job/start.py", line 9, in main\n    run()\n{error}\n'
    assert not any(one.cause == "exception" for one in diagnosed(tmp_path, "job.log", text).fired)
