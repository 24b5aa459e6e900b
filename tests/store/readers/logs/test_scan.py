"""The log scanner: ranks and fields out of lines of many launchers, in bounded memory, whatever the bytes are."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from store.readers.logs.line_filter import LONG_LINE_BYTES
from store.readers.logs.log_file import ReadLog
from store.readers.logs.plain_text import CHUNK_BYTES
from store.readers.logs.prefix import clean, read_prefix
from store.readers.logs.rows import log_rows
from store.readers.logs.rules import load_rules
from store.readers.logs.scan import KEPT_OF_A_KIND, read_log
from store.readers.logs.step_lines import read_step
from store.readers.logs.timestamps import Clock

CLOCK = Clock(year=2026)


def read(folder: Path, text: str | bytes, name: str = "job.log") -> ReadLog:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(path)


@pytest.mark.parametrize(
    ("line", "rank", "local_rank", "task", "host", "message"),
    [
        ("[rank3]:[E501 08:30:00.12 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog", 3, None, None, None, "Watchdog"),
        ("[default5]:Traceback", None, 5, None, None, "Traceback"),
        ("7: Traceback", None, None, 7, None, "Traceback"),
        ("[1,4]<stderr>:Traceback", 4, None, None, None, "Traceback"),
        ("worker-1: [rank9]: Traceback", 9, None, None, "worker-1", "Traceback"),
        ("(WorkerDict pid=71, ip=10.0.0.1) Traceback", None, None, None, "10.0.0.1", "Traceback"),
        ("(worker1, rank=1, pid=9) [n1:6]:gpu-1:9:12 [6] NCCL WARN", None, None, None, "gpu-1", "NCCL WARN"),
        ("[pod/job-worker-0/pytorch] [rank2]: Traceback", 2, None, None, "job-worker-0", "Traceback"),
        ("\x1b[31m[rank1]: Trace\x1b[0mback\x00", 1, None, None, None, "Traceback"),
        ("2026-03-01 08:30:00,123 - ERROR - x", None, None, None, None, "- ERROR - x"),
        ("Mar  1 08:30:00 gpu-03 kernel: [  1.000001] NVRM: Xid", None, None, None, "gpu-03", "NVRM: Xid"),
        ("6bd2d5e37ea2:9:12 [3] NCCL INFO x", None, None, None, "6bd2d5e37ea2", "NCCL INFO x"),
        ("2: 10-0-3-4:9:12 [3] NCCL INFO x", None, None, 2, "10-0-3-4", "NCCL INFO x"),
        ("[6bd2d5e37ea2:90424] Signal: Bus error (7)", None, None, None, "6bd2d5e37ea2", "Signal: Bus error (7)"),
        ("[gpu1:9    :0:12] Caught signal 7 (Bus error)", None, None, None, "gpu1", "Caught signal 7 (Bus error)"),
        ("08:30:00 [0] NCCL INFO x", None, None, None, None, "[0] NCCL INFO x"),
        ("2026-03-01T08:30:00.5Z: [1,12]<stdout>:loading", 12, None, None, None, "loading"),
        ("2026-03-01 08:30:00: [rank3]: KeyError: 4", 3, None, None, None, "KeyError: 4"),
        ("2026-03-01 08:30:00 : [default2]:loading", None, 2, None, None, "loading"),
        ("2026-03-01 08:30:00 - [Rank 7] loading", 7, None, None, None, "loading"),
    ],
)
def test_what_launchers_put_before_a_line(
    line: str, rank: int | None, local_rank: int | None, task: int | None, host: str | None, message: str
) -> None:
    text = clean(line.encode())
    prefix = read_prefix(text, CLOCK)
    assert (prefix.rank, prefix.local_rank, prefix.task, prefix.host) == (rank, local_rank, task, host)
    assert text[prefix.length :].strip() == message


@pytest.mark.parametrize(
    ("line", "step", "loss", "grad_norm", "seconds"),
    [
        (" iteration      100/  5000 | elapsed time per iteration (ms): 812.0 | lm loss: 6.5E+00 | grad norm: 1.25 |",
         100, 6.5, 1.25, 0.812),
        ("step: 10  loss:  7.5  grad_norm:  1.25  memory: 30GiB(40%)  tps: 3,456", 10, 7.5, 1.25, None),
        ("{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 1e-05, 'epoch': 0.1}", None, 2.5, 1.25, None),
        ("{'loss': 2.5, 'grad_norm': nan, 'train_speed(iter/s)': 0.5, 'global_step/max_steps': '10/100'}",
         10, 2.5, None, 2.0),
        ("steps: 20 loss: 0.5 iter time (s): 1.5 samples/sec: 3.4", 20, 0.5, None, 1.5),
        ("iter 100: loss 2.5, time 123.0ms, mfu 3.4%", 100, 2.5, None, 0.123),
        (" iteration      100/  5000 | consumed samples:        25600 |", 100, None, None, None),  # cut
    ],
)  # fmt: skip
def test_steps_that_trainers_print(
    line: str, step: int | None, loss: float | None, grad_norm: float | None, seconds: float | None
) -> None:
    said = read_step(line)
    assert said is not None
    assert (said.step, said.loss) == (step, loss)
    assert grad_norm is None or said.grad_norm == grad_norm
    assert (said.duration_ns is None) == (seconds is None)
    assert seconds is None or said.duration_ns == seconds * 1e9


def test_a_loss_without_a_step_is_no_step() -> None:
    assert read_step("the loss of packets was 3") is None


def test_tracebacks_of_two_ranks_between_each_other(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        "[rank3]: Traceback (most recent call last):\n[rank1]: Traceback (most recent call last):\n"
        '[rank3]:   File "a.py", line 1, in f\n[rank1]:   File "b.py", line 2, in g\n'
        "[rank1]: KeyError: 'x'\n[rank3]: ValueError: bad\n",
    )
    found = {event.rank: event.fields for event in log.events if event.fields.get("traceback")}
    assert (found[3]["type"], found[3]["message"]) == ("ValueError", "bad")
    assert (found[1]["type"], 'File "b.py"' in found[1]["traceback"]) == ("KeyError", True)


def test_the_table_of_failures_names_rank_and_signal(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-05-01_08:16:53\n  host      : gpu-01\n"
        "  rank      : 11 (local_rank: 3)\n  exitcode  : -9 (pid: 1168)\n  error_file: <N/A>\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 1168\n=======\n",
    )
    event = next(event for event in log.events if event.kind == "root_failure")
    assert event.fields["rank"] == 11
    assert event.fields["exitcode"] == -9
    assert event.fields["signal"] == "SIGKILL"


def test_a_line_that_a_terminal_broke_is_read_with_the_next(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        "[rank2]:[E513 13:25:57.7 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=53, OpType=BROADCAST, NumelIn=516, NumelOut=5\n16, Timeout(ms)=1800000) ran for 1800042 ms\n",
    )
    assert log.events[0].fields["numel_out"] == 516


def test_ranks_of_processes_and_devices_are_joined(tmp_path: Path) -> None:
    job = read(
        tmp_path,
        "gpu-01:900:901 [2] NCCL INFO comm 0x55 rank 2 nranks 8 cudaDev 2 busId 3b000 commId 0x1 - Init COMPLETE\n"
        "gpu-01:901:902 [3] NCCL INFO comm 0x55 rank 3 nranks 8 cudaDev 3 busId 5e000 commId 0x1 - Init COMPLETE\n",
    )
    kernel = read(
        tmp_path,
        "[1.5] NVRM: Xid (PCI:0000:5e:00): 79, pid=12, name=python, GPU has fallen off the bus.\n"
        "[2.5] Out of memory: Killed process 900 (python) total-vm:1kB, anon-rss:4kB\n",
        "dmesg-gpu-01.txt",
    )
    rows, _ = log_rows([job, kernel], {})
    assert {row["kind"]: row["rank"] for row in rows if row["source"].startswith("dmesg")} == {
        "xid": 3, "gpu_lost": 3, "oom_kill": 2,
    }  # fmt: skip


def test_many_of_a_kind_are_bounded_and_the_rest_is_still_read(tmp_path: Path) -> None:
    noise = "gpu-01:1:2 [0] NCCL WARN something odd\n" * 30_000
    log = read(tmp_path, noise + "[rank1]: ValueError: late\n")
    assert sum(event.kind == "nccl_warning" for event in log.events) == KEPT_OF_A_KIND
    assert log.given_up
    assert log.events[-1].kind == "exception"
    assert log.num_lines == 30_001


def test_lines_at_the_seams_of_chunks_are_found_once(tmp_path: Path) -> None:
    line = "[rank1]: ValueError: late\n"
    filler = "x" * 997 + "\n"
    text = filler * (CHUNK_BYTES // 998) + line + filler * 5000 + line
    log = read(tmp_path, gzip.compress(text.encode()), "job.log.gz")
    assert [event.line for event in log.events] == [CHUNK_BYTES // 998 + 1, text.count("\n")]


def test_no_bytes_break_it(tmp_path: Path) -> None:
    random.seed(1)
    pieces = [literal for rule in load_rules() for literal in rule.literals]
    blob = b"".join(
        random.choice(pieces) + random.randbytes(random.randrange(200)) + random.choice([b"", b"\n", b"\r"])
        for _ in range(4000)
    )
    log = read(tmp_path, blob)
    assert log.problem == ""
    assert all("\x1b" not in event.message and "\x00" not in event.message for event in log.events)


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    log = read(tmp_path, b"A" * (12 << 20) + b"ValueError: x")
    assert log.num_bytes == (12 << 20) + 13
    assert log.num_lines == 1
    assert log.given_up == ["line 1 is longer than 4 MiB: the rest of it was not read"]


def test_what_follows_a_line_without_end_is_read(tmp_path: Path) -> None:
    """A line of 1.3 GB from 3 MB took minutes: each 16 KiB of it were matched as a line."""
    text = b"ValueError: first\n" + b"step 12 loss 3.14 " * 1_000_000 + b"\n[rank1]: ValueError: last\n"
    log = read(tmp_path, gzip.compress(text, 1), "job.log.gz")
    assert (log.num_lines, log.num_bytes) == (3, len(text))
    assert [event.line for event in log.events if event.kind != "step"] == [1, 3]
    assert len(log.steps) < 1000


def test_a_progress_bar_of_one_line_is_read_to_its_end(tmp_path: Path) -> None:
    bars = b"".join(b"%d/4500 [00:01<00:01, 9.0it/s] |%s|\r" % (step, b"#" * 1000) for step in range(4500))
    assert len(bars) > CHUNK_BYTES
    log = read(tmp_path, bars + b"ValueError: x\n")
    assert not [why for why in log.given_up if "longer" in why]
    assert log.events[-1].message.endswith("ValueError: x")


def test_a_cut_archive_keeps_what_came_before(tmp_path: Path) -> None:
    blob = gzip.compress(b"ValueError: x\n" + bytes(random.randbytes(1 << 20)))
    log = read(tmp_path, blob[: len(blob) // 2], "a.log.gz")
    assert "cut off" in log.problem


def test_each_rule_names_the_source_of_its_wording() -> None:
    rules = load_rules()
    assert len(rules) > 50
    assert all(rule.source for rule in rules)


def test_lines_of_a_short_log_are_those_that_the_automata_find_in_a_long_one(tmp_path: Path) -> None:
    chooser = random.Random(11)
    words = [literal.decode() for rule in load_rules() for literal in rule.literals]
    lines = [f"[rank{chooser.randrange(4)}]: {' '.join(chooser.choices(words, k=2))} 7" for _ in range(400)]
    lines += [f"[rank1]: step: {step} loss: {3 - step / 100:.2f}" for step in range(40)]
    chooser.shuffle(lines)
    text = "\n".join(lines) + "\n"
    assert len(text) < LONG_LINE_BYTES
    short = read(tmp_path, text)
    long = read(tmp_path, text + "nothing to see on this line\n" * (LONG_LINE_BYTES // 20))
    assert len(short.events) > 200
    assert [(one.kind, one.line, one.rank) for one in short.events] == [
        (one.kind, one.line, one.rank) for one in long.events
    ]
    assert [step.step_line for step in short.steps] == [step.step_line for step in long.steps]
