"""Short logs behind what a collector writes before each line: the verdict is that of the log without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from store.readers.logs.scan import read_log
from tests.analyzers.evidence.written import diagnosed

PREFIXES = (
    "2026-03-01 10:00:0{i},210 - launcher - INFO - ",
    "sft-worker-3 trainer ",
    "algo-2-q81mz  | ",
    "<14>1 2026-03-01T10:00:0{i}Z node7 job 71 - - ",
    "2026-03-01T10:00:0{i}.100Z stderr F ",
    "177235920{i}.100000 ",
    "2026-03-01T10:00:0{i}Z {{}} ",
    '2026-03-01T10:00:0{i}Z {{app="sft", pod="sft-0"}} ',
)
WATCHDOG = (
    "[rank{r}]:[E301 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=412, OpType=ALLREDUCE, NumelIn=88, NumelOut=88, Timeout(ms)=600000) ran for 600041 milliseconds "
    "before timing out.\n"
)
FRAMES = 'Traceback (most recent call last):\n  File "/job/sft.py", line 44, in main\n    step(batch)\n'


def behind(prefix: str, text: str) -> str:
    return "".join(f"{prefix.format(i=i % 10)}{line}\n" for i, line in enumerate(text.splitlines()))


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("text", "cause", "ranks"),
    [
        ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error\nstopped\n", "unreachable", ()),
        ("".join(WATCHDOG.format(r=r) for r in (0, 1, 3)), "not_entered", (2,)),
        (f"{FRAMES}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n", "out_of_memory", ()),
        ("sft.py: error: argument --bf16: expected one argument\n", "exception", ()),
    ],
)
def test_a_log_of_few_lines_is_read_behind_a_prefix(
    prefix: str, text: str, cause: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    (finding, *_) = diagnosed(tmp_path, "job.log", behind(prefix, text)).fired
    assert (finding.cause, finding.ranks) == (cause, ranks)


@pytest.mark.parametrize("indent", [True, False])
@pytest.mark.parametrize("prefix", ["[2026-03-01 10:00:0{i}] [INFO] ", "[INFO] ", "2026-03-01 10:00:0{i} DEBUG "])
def test_a_level_before_each_line_of_a_traceback_belongs_to_the_collector(
    prefix: str, indent: bool, tmp_path: Path
) -> None:
    text = f"{FRAMES}RuntimeError: no lane is open\n"
    text = text if indent else "".join(f"{line.strip()}\n" for line in text.splitlines())
    (finding,) = diagnosed(tmp_path, "job.log", behind(prefix, text).replace("\n", "\r\n").encode("utf-16")).fired
    assert "RuntimeError: no lane is open (job/sft.py:44 in main)" in finding.summary


def test_a_level_before_the_first_line_alone_belongs_to_the_message(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(f"[2026-03-01 10:00:01] [INFO] {FRAMES}ValueError: no key\n", encoding="utf-8")
    assert read_log(path).events[0].fields["is_warning"] == 1


@pytest.mark.parametrize("prefix", [*PREFIXES, "[0]:", "[default0]:"])
def test_the_frames_of_a_traceback_are_read_behind_a_prefix(prefix: str, tmp_path: Path) -> None:
    text = "".join(f"step {step} loss {3 - step / 20}\n" for step in range(20))
    (finding,) = diagnosed(tmp_path, "job.log", behind(prefix, f"{text}{FRAMES}KeyError: 'text'\n")).fired
    assert "KeyError: 'text' (job/sft.py:44 in main)" in finding.summary


def test_a_rank_that_begins_every_line_is_not_part_of_the_prefix(tmp_path: Path) -> None:
    lines = (
        'Traceback (most recent call last):', '  File "/job/sft.py", line 8, in main', "    load(path)",
        '  File "/job/io.py", line 91, in load', "    read(index)", "  raised below", "KeyError: 'text'",
    )  # fmt: skip
    text = behind(PREFIXES[3], "".join(f"[rank5]: {line}\n" for line in lines))
    (finding,) = diagnosed(tmp_path, "job.log", text).fired
    assert finding.ranks == (5,)


@pytest.mark.parametrize(
    "before", ["", "trainer-0  | ", "[pod/sft-worker-1/trainer] ", "2026-03-01T10:00:00.5Z stdout F "]
)
def test_objects_behind_the_name_of_a_container_are_unwrapped(before: str, tmp_path: Path) -> None:
    text = f"{FRAMES}ValueError: batch is empty\n"
    objects = (
        {"log": line, "stream": "stderr", "time": "2026-03-01T10:00:00Z"} for line in text.splitlines(keepends=True)
    )
    wrapped = "".join(f"{before}{json.dumps(one)}\n" for one in objects)
    (finding,) = diagnosed(tmp_path, "job.log", wrapped).fired
    assert "ValueError: batch is empty (job/sft.py:44 in main)" in finding.summary


def test_a_time_on_each_line_does_not_cut_an_error_of_several_lines(tmp_path: Path) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/job/sft.py", line 44, in main\n'
        "RuntimeError: Caught RuntimeError in DataLoader worker process 3.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/job/corpus.py", line 77, in __getitem__\n'
        "RuntimeError: stack expects each tensor to be equal size\n"
    )
    (finding, *_) = diagnosed(tmp_path, "job.log", behind(PREFIXES[4], text)).fired
    assert "equal size" in finding.summary
    assert "corpus.py:77" in finding.summary


@pytest.mark.parametrize(
    "below",
    [
        "slurmstepd: error: *** STEP 71.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 ***\n"
        "srun: error: n1: tasks 0-1,3: Terminated\nsrun: error: n1: task 2: Exited with exit code 1\n",
        "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 71 closing signal SIGTERM\n"
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 2 (pid: 73)\n",
    ],
)
def test_launcher_lines_right_below_an_error_are_not_part_of_it(below: str, tmp_path: Path) -> None:
    (finding, *_) = diagnosed(tmp_path, "job.log", f"{FRAMES}KeyError: 'text'\n{below}").fired
    assert (finding.cause, finding.ranks) == ("exception", (2,))
    assert "sft.py:44" in finding.summary


def test_interleaved_tracebacks_are_not_attributed_to_the_one_rank_that_failed(tmp_path: Path) -> None:
    mixed = "".join(line * 2 for line in f"{FRAMES}KeyError: 'text'\n".splitlines(keepends=True))
    end = "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 1 (pid: 7)\n"
    (finding, *_) = diagnosed(tmp_path, "job.log", mixed + end).fired
    assert finding.ranks == ()


def test_the_frames_of_a_traceback_without_its_head_are_read(tmp_path: Path) -> None:
    text = (
        "    return self.head(states)\n"
        '  File "/job/model.py", line 210, in head\n'
        "    return states[index]\n"
        "RuntimeError: CUDA error: device-side assert triggered\n"
        "[rank3]:[E301 10:00:00.1 ProcessGroupNCCL.cpp:1515] [PG 3 Rank 3] Process group watchdog thread terminated "
        "with exception: CUDA error: device-side assert triggered\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "  what():  [PG 3 Rank 3] Process group watchdog thread terminated with exception: CUDA error: "
        "device-side assert triggered\n"
    )
    (finding, *_) = diagnosed(tmp_path, "job.log", text).fired
    assert (finding.cause, finding.ranks) == ("device_assert", (3,))
    assert "model.py:210" in finding.summary


def test_what_a_node_of_skypilot_wrote_is_read(tmp_path: Path) -> None:
    prefix = "(worker1, rank=1, pid=3120, ip=10.0.0.8) "
    (finding,) = diagnosed(tmp_path, "job.log", behind(prefix, f"{FRAMES}ValueError: batch is empty")).fired
    assert "ValueError: batch is empty (job/sft.py:44 in main)" in finding.summary
    assert (finding.ranks, finding.evidence["host"]) == ((), "worker1")  # its number is that of a node


def test_an_error_of_one_host_names_the_host(tmp_path: Path) -> None:
    text = behind("node-01: ", "index built") + behind("node-02: ", f"{FRAMES}FileNotFoundError: no index")
    (finding,) = diagnosed(tmp_path, "job.log", text).fired
    assert finding.evidence["host"] == "node-02"


def labelled(first: int, second: int) -> str:
    """Steps of two processes whose lines lie between each other's, then an error of the second."""
    steps = "".join(f"[{label}] iter {n} loss {3 - n / 50:.3f}\n" for n in range(12) for label in (first, second))
    return steps + "".join(f"[{second}] {line}\n" for line in f"{FRAMES}KeyError: 'label'".splitlines())


def test_the_label_that_mpiexec_writes_before_each_line_is_a_rank(tmp_path: Path) -> None:
    (finding,) = diagnosed(tmp_path, "job.log", labelled(0, 1)).fired
    assert (finding.cause, finding.ranks) == ("exception", (1,))
    stalled = (
        "[0] [2026-03-01 10:00:00.1: W horovod/stall_inspector.cc:107] One or more tensors were submitted to be "
        "reduced by subset of ranks and are waiting for remainder of ranks for more than 60 seconds.\n"
        "[0] Missing ranks:\n[0] 1: [grad.a, grad.b]\n"
    )
    assert diagnosed(tmp_path, "job.log", labelled(0, 1)[:600] + "\n" + stalled).fired[0].ranks == (1,)
    assert diagnosed(tmp_path, "job.log", stalled).fired[0].ranks == (1,)


@pytest.mark.parametrize("number", ["0", "{n}", "{epoch}"])
def test_a_number_in_brackets_that_does_not_change_between_lines_is_no_rank(tmp_path: Path, number: str) -> None:
    steps = "".join(f"[{number.format(n=n, epoch=n // 9)}] iter {n} loss {3 - n / 50:.3f}\n" for n in range(40))
    (finding,) = diagnosed(tmp_path, "job.log", f"{steps}{FRAMES}KeyError: 'label'\n").fired
    assert (finding.cause, finding.ranks) == ("exception", ())
