"""Files of programs around training, in the shape in which each program writes them: what is found in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.programs import sacct
from store.readers.programs.registry import program_of
from tests.analyzers.evidence.written import diagnosed

# ---- schedulers and hosts ----

SACCT = """\
JobID           JobName  Partition    Account  AllocCPUS      State ExitCode
------------ ---------- ---------- ---------- ---------- ---------- --------
4711              train        gpu        lab        256 {state:>10}      0:0
4711.batch        batch                   lab        256  CANCELLED     0:15
4711.extern      extern                   lab        256  COMPLETED      0:0
"""
SACCT_P = """\
JobID|JobName|State|ExitCode|Start|End|NodeList
4711|train|{state}|0:0|2026-11-25T08:00:00|2026-11-26T08:00:12|gpu-[01-04]
4711.batch|batch|CANCELLED|0:15|2026-11-25T08:00:00|2026-11-26T08:00:12|gpu-01
"""
NODES = """\
NodeName=gpu-01 Arch=x86_64 CoresPerSocket=64
   CPUAlloc=256 CPUEfctv=256 CPUTot=256 CPULoad=12.04
   State=MIXED ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   BootTime=2026-11-01T08:00:00 SlurmdStartTime=2026-11-01T08:01:00

NodeName=gpu-02 Arch=x86_64 CoresPerSocket=64
   State=DOWN*+DRAIN ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Reason=Not responding [slurm@2026-11-26T03:02:10]
"""
REASONS = "REASON               USER      TIMESTAMP           STATE NODELIST\n"
DRAINED = """\
$ scontrol show node gpu-07
NodeName=gpu-07 Arch=x86_64 CoresPerSocket=64
   State=IDLE+DRAIN ThreadsPerCore=2 TmpDisk=0 Weight=1
   Reason={reason} [root@2026-11-26T03:02:10]
"""
DIAG = """\
Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Metadata  ----------+------------------------------------------------|
| DCGM Version              | 3.3.1                                          |
|-----  Deployment  --------+------------------------------------------------|
| Persistence Mode          | Fail                                           |
+-----  Integration  -------+------------------------------------------------+
| PCIe                      | Pass - All                                     |
+-----  Hardware  ----------+------------------------------------------------+
| GPU Memory                | {result}                                 |
| Warning                   | GPU 3 Two rows could not be remapped.          |
|                           | Drain the GPU.                                 |
+---------------------------+------------------------------------------------+
"""
HEALTH = """\
+---------------------------+----------------------------------------------------------+
| Health Monitor Report                                                                |
+===========================+==========================================================+
| Overall Health            | Failure                                                  |
| GPU                       |                                                          |
| -> 2                      | Failure                                                  |
|    -> Errors              |                                                          |
|       -> NVLINK system    | Failure                                                  |
|                           | Link 4 is currently down.                                |
+---------------------------+----------------------------------------------------------+
"""
JOURNAL = "".join(
    json.dumps({"__CURSOR": "s=1", "__REALTIME_TIMESTAMP": "1790000000123456", "_HOSTNAME": "gpu-03", "PRIORITY": "3",
                "SYSLOG_IDENTIFIER": "kernel", "MESSAGE": text}) + "\n"
    for text in (
        "nvidia 0000:4e:00.0: enabling device",
        "NVRM: Xid (PCI:0000:4e:00): 79, pid=4242, name=python, GPU has fallen off the bus.",
    )
)  # fmt: skip
EVENTS = json.dumps(
    {"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Event", "reason": "Pulled", "message": "Container image is present",
         "involvedObject": {"kind": "Pod", "name": "train-worker-3"}, "lastTimestamp": "2026-11-26T10:00:00Z"},
        {"apiVersion": "v1", "kind": "Event", "reason": "Evicted",
         "message": "The node was low on resource: memory. Threshold quantity: 100Mi, available: 12Mi.",
         "involvedObject": {"kind": "Pod", "name": "train-worker-3"}, "lastTimestamp": "2026-11-26T10:30:00Z"},
    ]}
)  # fmt: skip
POD = json.dumps(
    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train-worker-5"}, "spec": {}, "status": {
        "phase": "Failed", "containerStatuses": [{"name": "pytorch", "state": {"terminated": {
            "exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-26T10:30:00Z"}}}]}}
)  # fmt: skip
DESCRIBE = """\
Name:             train-worker-5
Namespace:        ml
Priority:         0
Node:             gpu-07/10.0.0.7
Containers:
  pytorch:
    Image:          trainer:1
    State:          Waiting
      Reason:       CrashLoopBackOff
    Last State:     Terminated
      Reason:       OOMKilled
      Exit Code:    137
Events:           <none>
"""
SMI_LOST = """\
timestamp, name, pci.bus_id, temperature.gpu, utilization.gpu [%]
2026/11/26 10:00:00.123, NVIDIA H100 80GB HBM3, 00000000:1B:00.0, 45, 98 %
2026/11/26 10:00:00.124, NVIDIA H100 80GB HBM3, 00000000:4E:00.0, [GPU is lost], [GPU is lost]
"""


@pytest.mark.parametrize(
    ("name", "text", "cause", "said"),
    [
        ("sacct.txt", SACCT.format(state="TIMEOUT"), "time_limit", ""),
        ("sacct.txt", SACCT.format(state="NODE_FAIL"), "node_failed", ""),
        ("sacct.txt", SACCT_P.format(state="TIMEOUT"), "time_limit", ""),
        ("sacct.txt", SACCT_P.format(state="OUT_OF_MEMORY"), "host_out_of_memory", ""),
        ("sacct.txt", SACCT_P.format(state="PREEMPTED"), "preempted", ""),
        ("sacct.txt", "$ sacct -j 4711\n" + SACCT.format(state="OUT_OF_ME+"), "host_out_of_memory", ""),
        ("sacct.txt", SACCT.format(state="FAILED").replace("0:0", "1:0"), "exit", "exit code 1"),
        ("sacct.txt", SACCT_P.format(state="FAILED").replace("0:0", "0:9"), "signal", "SIGKILL"),
        ("nodes.txt", NODES, "node_failed", "gpu-02"),
        ("node.txt", DRAINED.format(reason="Kill task failed"), "node_failed", "gpu-07 out of service: Kill task"),
        ("node.txt", DRAINED.format(reason="gpu xid 94"), "device_error", "took gpu-07 out of service: gpu xid 94"),
        ("reasons.txt", REASONS + "NHC: gpu xid 94      root      Unknown             down* gpu-07\n", "device_error",
         "took gpu-07 out of service: NHC: gpu xid 94"),
        ("diag.txt", DIAG.format(result="Fail - GPU: 3 "), "device_error",
         "GPU 3 failed a DCGM test (GPU Memory): GPU 3 Two rows could not be remapped. Drain the GPU"),
        ("health.txt", HEALTH, "device_error", "GPU 2 failed a DCGM test (NVLINK system): Link 4"),
        ("journal.json", JOURNAL, "device_error", "0000:4e:00"),
        ("events.json", EVENTS, "host_out_of_memory", ""),
        ("pod.json", POD, "host_out_of_memory", "train-worker-5"),
        ("pod.txt", DESCRIBE, "host_out_of_memory", "train-worker-5"),
        ("smi.csv", SMI_LOST, "device_error", "4E:00.0"),
        ("smi.txt", "Unable to determine the device handle for GPU0000:4E:00.0: GPU is lost.  Reboot the system\n",
         "device_error", "4E:00.0"),
    ],
)  # fmt: skip
def test_the_end_of_a_job_is_read_from_schedulers_and_hosts(
    tmp_path: Path, name: str, text: str, cause: str, said: str
) -> None:
    first = diagnosed(tmp_path, name, text).findings[0]
    assert (first.kind, first.cause) == ("rank_lost", cause)
    assert said in first.summary
    assert first.evidence["lines"][0].startswith(f"{name}:")


@pytest.mark.parametrize("text", [SACCT.format(state="COMPLETED").replace("CANCELLED", "COMPLETED"),
                                  SACCT_P.format(state="COMPLETED"), NODES.replace("DOWN*+DRAIN", "IDLE"),
                                  DRAINED.format(reason="maintenance until Friday"),
                                  DIAG.format(result="Pass - All    "),
                                  HEALTH.replace("Failure", "Healthy")])  # fmt: skip
def test_a_job_that_completed_and_nodes_that_work_give_no_finding(tmp_path: Path, text: str) -> None:
    diagnosis = diagnosed(tmp_path, "slurm.txt", text)
    assert [finding.kind for finding in diagnosis.findings if finding.status == "fired"] == []


TABLE = """\
JobID           JobName   State  ExitCode
------------ ---------- ------- ---------
{row}
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("JobIDRaw,JobName,State,ExitCode\n99,train,NODE_FAIL,1:0\n", "node_failed"),
        ("JobID;State;ExitCode\n99;PREEMPTED;0:0\n", "preempted"),
        (TABLE.format(row="99                train NODE_F+       1:0"), "node_failed"),  # a narrow column
        (TABLE.format(row="99    train    PREEMPTED    0:0"), "preempted"),  # copied without the columns' places
    ],
)
def test_sacct_with_other_delimiters_and_columns(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text(text, encoding="utf-8")
    assert [event["kind"] for event in sacct.read(path).log_events] == [kind]


def test_of_several_jobs_of_sacct_the_last_is_judged(tmp_path: Path) -> None:
    text = SACCT_P.format(state="TIMEOUT") + "4712|train|COMPLETED|0:0|||gpu-01\n"
    diagnosis = diagnosed(tmp_path, "sacct.txt", text)
    assert diagnosis.fired == ()
    assert "only the last, 4712" in diagnosis.run["file_problems"][0]["problem"]


# ---- readings of GPUs ----


def smi_csv() -> str:
    lines = ["timestamp, uuid, temperature.gpu, utilization.gpu [%], clocks.sm [MHz], clocks_event_reasons.active"]
    for second in range(40):
        for device in range(2):
            hot = device == 1 and second >= 10
            values = "93, 99 %, 900 MHz, 0x0000000000000040" if hot else "60, 99 %, 1980 MHz, 0x0000000000000000"
            lines.append(f"2026/11/26 10:00:{second:02d}.000, GPU-{device}, {values}")
    return "\n".join(lines) + "\n"


def dmon() -> str:
    lines = []
    for second in range(40):
        if second % 20 == 0:
            lines += ["#Entity   TMPTR   GPUTL   SMCLK   DVCCTR", "ID        C               MHz"]
        lines += ["GPU 0     60      99      1980    0", f"GPU 1     {93 if second > 10 else 60}      99      900     "
                  f"{64 if second > 10 else 0}"]  # fmt: skip
    return "\n".join(lines) + "\n"


SMI_QUERY = """\

==============NVSMI LOG==============

Timestamp                                 : Thu Nov 26 10:00:00 2026
Driver Version                            : 570.86.15
CUDA Version                              : 12.8

Attached GPUs                             : 2
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU UUID                              : GPU-aaaa
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 0
        Pending                           : No
        Remapping Failure Occurred        : No
    Temperature
        GPU Current Temp                  : 45 C
GPU 00000000:4E:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    GPU UUID                              : GPU-bbbb
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 3
        Pending                           : No
        Remapping Failure Occurred        : Yes
    Temperature
        GPU Current Temp                  : 47 C
"""


DCGM_4 = """\
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
| software                  | Pass                                           |
|                           | GPU0: Pass                                     |
|                           | GPU1: Pass                                     |
| memory                    | Fail                                           |
|                           | GPU0: Pass                                     |
|                           | GPU1: Fail                                     |
| Warning: GPU1             | A row could not be remapped.                   |
+---------------------------+------------------------------------------------+
"""


def test_a_gpu_that_passed_below_a_failed_test_is_not_named(tmp_path: Path) -> None:
    (found,) = diagnosed(tmp_path, "diag.txt", DCGM_4).fired
    assert found.summary.startswith("GPU 1 failed a DCGM test (memory): ")
    assert "GPU0" not in found.summary


@pytest.mark.parametrize("form", ["coloured", "UTF-16"])
def test_a_programs_text_in_colours_or_utf_16_is_read(tmp_path: Path, form: str) -> None:
    path = tmp_path / "diag.txt"
    coloured = DCGM_4.replace("Fail", "\x1b[1;31mFail\x1b[0m").replace("| Diagnostic", "\x1b[1m| Diagnostic")
    path.write_bytes(coloured.encode() if form == "coloured" else DCGM_4.encode("utf-16"))
    (found,) = diagnose_files([path]).fired
    assert found.summary.startswith("GPU 1 failed a DCGM test (memory): ")


@pytest.mark.parametrize(
    ("name", "text", "kind", "device"),
    [
        ("smi.csv", smi_csv(), "gpu_throttled", "GPU-1"),
        ("dmon.txt", dmon(), "gpu_throttled", "GPU 1"),
        ("smi.txt", SMI_QUERY, "gpu_memory_errors", "GPU-bbbb"),
    ],
)
def test_readings_of_gpus_are_judged_as_those_of_a_recorded_run(
    tmp_path: Path, name: str, text: str, kind: str, device: str
) -> None:
    (found,) = diagnosed(tmp_path, name, text).fired
    assert found.kind == kind
    assert device in found.summary


# ---- stacks ----

SPY = """\
Process {pid}: python -u train.py --config gpt
Python v3.11.9 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
{frames}
    main (train.py:210)
    <module> (train.py:220)
Thread 999 (idle): "QueueFeederThread"
    wait (threading.py:320)
"""
WAITS = """\
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    wrapper (torch/distributed/c10d_logger.py:81)
    train_step (train.py:120)"""
LOADS = """\
    read_shard (data.py:44)
    train_step (train.py:101)"""
GDB = """\
[Switching to thread 1 (Thread 0x7f2b "python")]
Thread 1 (Thread 0x7f2b8a1c7740 (LWP {pid})):
#0  0x00007f2b89c91117 in __futex_abstimed_wait_common () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x00007f2b12a3e0a1 in {function} (this=0x55d0) at {place}
#2  0x000055d0c1f3a2b4 in main () at main.cpp:10
"""


def spied(rank: int, odd: int) -> str:
    return SPY.format(pid=4000 + rank, frames=LOADS if rank == odd else WAITS)


def spied_as_json(rank: int, odd: int) -> str:
    frames = [("read_shard", "data.py", 44)] if rank == odd else [
        ("all_reduce", "torch/distributed/distributed_c10d.py", 2810)]  # fmt: skip
    frames.append(("train_step", "train.py", 101 if rank == odd else 120))
    listed = [
        {"name": name, "filename": f"/x/{file}", "short_filename": file, "line": line} for name, file, line in frames
    ]
    return json.dumps(
        [{"pid": 4000 + rank, "thread_id": 1, "thread_name": "MainThread", "active": False, "frames": listed}], indent=2
    )


def traced(rank: int, odd: int) -> str:
    function, place = ("read_shard", "data.cpp:44") if rank == odd else ("ncclAllReduce_wait", "step.cpp:120")
    return GDB.format(pid=4000 + rank, function=function, place=place)


INTERPRETER = """\
#3  0x00007fd853301c9c in _PyEval_EvalFrameDefault (throwflag=<optimized out>) at Python/ceval.c:5020
#4  0x00007fd8534ba217 in pymain_main (args=0x7ffed2419310) at Modules/main.c:710
#5  0x000055cf16ec1081 in _start ()
"""


def interpreted(rank: int, odd: int) -> str:
    """A Python process in gdb, as a real one was seen: neither of the two has a frame of the program."""
    frames = """\
#0  0x00007fd8530ed545 in __GI___clock_nanosleep (flags=1) at ../sysdeps/unix/sysv/linux/clock_nanosleep.c:48
#1  0x00007fd853515ada in pysleep (timeout=<optimized out>) at ./Modules/timemodule.c:2159
""" if rank == odd else f"""\
#0  0x00007f3a1a2b3c{rank}d in ?? () from /lib/x86_64-linux-gnu/libcuda.so.1
#1  0x00007f3a316a741d in std::condition_variable::wait(std::unique_lock<std::mutex>&) () from /lib/libstdc++.so.6
#2  0x00007f3a3816984b in c10d::Work::wait(std::duration<long>) () from /x/site-packages/torch/lib/libtorch_cpu.so
"""  # fmt: skip
    return f'Thread 1 (Thread 0x7fd8 (LWP {4000 + rank}) "python"):\n{frames}{INTERPRETER}'


def test_a_python_process_in_gdb_is_named_by_the_library_in_which_it_waits(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}.txt").write_text(interpreted(rank, 2))
    (hang,) = diagnose_files([tmp_path]).findings
    assert (hang.status, hang.ranks) == ("suspect", (2,))
    assert "wait in torch/lib/libtorch_cpu.so c10d::Work::wait (ranks 0, 1 and 3)" in hang.summary
    assert "rank 2 in Modules/timemodule.c:2159 pysleep" in hang.summary


@pytest.mark.parametrize("write", [spied, spied_as_json, traced])
def test_the_process_that_stands_elsewhere_is_suspected(tmp_path: Path, write: Callable[[int, int], str]) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}.txt").write_text(write(rank, 2))
    (hang,) = diagnose_files([tmp_path]).findings
    assert (hang.kind, hang.status, hang.ranks) == ("hang", "suspect", (2,))
    assert hang.evidence["waiting_ranks"] == [0, 1, 3]
    assert any("44" in frame for frame in hang.evidence["stack_groups"][1]["frames"])


def test_equal_stacks_name_no_rank(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}.txt").write_text(spied(rank, 9))
    (unsure,) = diagnose_files([tmp_path]).findings
    assert unsure.status == "insufficient_data"
    assert "ranks 0-3 in train.py:120 train_step" in unsure.summary


# ---- NCCL ----


def scrape(rank: int) -> str:
    labels = f'comm_id="0xd152",collective="AllReduce",hostname="gpu-01",rank="{rank}",pid="{70 + rank}",n_ranks="4",' \
             f'n_nodes="1",coll_sn="{{seq}}",timestamp="2026-11-26T03:31:47Z"'  # fmt: skip
    return "".join(
        f"nccl_algorithm_bandwidth_gbs{{{labels.format(seq=seq)}}} 120.5\n"
        f"nccl_collective_exec_time_microseconds{{{labels.format(seq=seq)}}} {300 if rank == 2 else 9000}\n"
        for seq in range(100, 200)
    )


def test_scrapes_of_the_inspector_are_judged_as_its_logs(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"nccl_inspector_GPU{rank}.prom").write_text(scrape(rank))
    diagnosis = diagnose_files([tmp_path])
    (late,) = (finding for finding in diagnosis.findings if finding.status == "suspect")
    assert (late.kind, late.ranks) == ("straggler", (2,))


@pytest.mark.parametrize(("bad", "said"), [(50, "and finite again afterwards"), (99, "the last printed step")])
def test_a_table_in_utf_16_is_read_and_its_last_loss_is_not_finite_again(tmp_path: Path, bad: int, said: str) -> None:
    text = "step,loss\r\n" + "".join(f"{step},{'nan' if step == bad else 2.0}\r\n" for step in range(100))
    (found,) = diagnosed(tmp_path, "metrics.csv", text.encode("utf-16")).fired
    assert f"not finite at step {bad} only, {said}" in found.summary


def test_metrics_by_the_names_of_nemo_are_judged(tmp_path: Path) -> None:
    rows = (f"0,{step},{3 - step / 1e3},{1.0 if step < 150 else 2.0}\n" for step in range(300))
    text = "epoch,step,reduced_train_loss,train_step_timing in s\n" + "".join(rows)
    (found,) = diagnosed(tmp_path, "metrics.csv", text).fired
    assert "slower since step 150: 2,000 ms per step instead of 1,000" in found.summary


@pytest.mark.parametrize("has_batch", [True, False])
def test_samples_of_mlperf_are_counted_in_batches(tmp_path: Path, has_batch: bool) -> None:
    def line(key: str, value: float, at_s: float, **about: object) -> str:
        entry = {"time_ms": int(1.79e12 + at_s * 1e3), "key": key, "value": value, "metadata": about}
        return f":::MLLOG {json.dumps(entry)}\n"

    times = [number if number < 60 else 60 + 3 * (number - 60) for number in range(100)]
    text = line("global_batch_size", 512, 0.0) if has_batch else ""
    text += "".join(line("train_loss", 3 - at / 1e3, at, samples_count=512 * n) for n, at in enumerate(times, 1))
    (found,) = diagnosed(tmp_path, "mllog.txt", text).fired
    assert "3,000 ms per step instead of 1,000" in found.summary


def test_no_reader_takes_a_text_log_or_a_table_of_something_else() -> None:
    for text in (b"step: 10 loss: 2.1\n", b"name,width\na,1\n", b'{"seed": 7}', b"", b"Name: x\n", b"#1 is down\n",
                 b"JobID is 4711 and State unknown yet\n"[6:]):  # fmt: skip
        assert program_of(text) is None


def test_several_reasons_of_sinfo_are_of_the_whole_cluster(tmp_path: Path) -> None:
    rows = "".join(f"NHC: gpu lost        root      2026-11-26T03:02:1{n} down* gpu-0{n}\n" for n in (1, 2))
    assert "sinfo -R -n NODELIST" in diagnosed(tmp_path, "reasons.txt", REASONS + rows).verdict
    planned = REASONS + "Kernel upgrade       root      2026-11-26T03:02:10 drain gpu-01\n"
    assert not diagnosed(tmp_path, "reasons.txt", planned).findings
