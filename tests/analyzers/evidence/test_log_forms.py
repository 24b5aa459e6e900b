"""One death in the forms that launchers leave: `tee`, a file a rank, Slurm, Kubernetes, Ray, tracebacks mixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.logs.blocks.wrapped import unwrapped
from tests.analyzers.evidence.written import diagnosed

CULPRIT, RANKS = 2, 4
OWN = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 41, in step',
    "    loss = model(batch)",
    "IndexError: list index out of range",
]
LOST = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 44, in step',
    "    dist.all_reduce(total)",
    '  File "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py", line 3105, in all_reduce',
    "    work.wait()",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.3]:1234",
]
TABLE = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_08:30:09
  host      : gpu-01
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 4712)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def lines_of(rank: int) -> list[str]:
    return [f"step: {step} loss: 2.{9 - step}" for step in range(9)] + (OWN if rank == CULPRIT else LOST)


def mixed(label: Callable[[int], str]) -> str:
    """All ranks' lines, one of each in turn: the tracebacks stand between each other."""
    streams = {rank: [f"{label(rank)}{line}" for line in lines_of(rank)] for rank in range(RANKS)}
    order = [rank for at in range(20) for rank in streams if at < len(streams[rank])]
    return "".join(streams[rank].pop(0) + "\n" for rank in order)


def tee(folder: Path) -> None:
    plain = [line for rank in (CULPRIT, 0, 1, 3) for line in lines_of(rank)]
    colours = "\x1b[31m" + "\n".join(plain) + "\x1b[0m\n" + TABLE
    (folder / "train.log").write_text(colours.replace("step: 3", "\rstep: 3"))


def prefixed(folder: Path) -> None:
    (folder / "out.log").write_text(mixed(lambda rank: f"[rank{rank}]: ") + TABLE)


def per_rank(folder: Path) -> None:
    for rank in range(RANKS):
        place = folder / "none_x8s" / "attempt_0" / str(rank)
        place.mkdir(parents=True)
        (place / "stderr.log").write_text("\n".join(lines_of(rank)[9:]) + "\n")
        (place / "stdout.log").write_text("\n".join(lines_of(rank)[:9]) + "\n")


def slurm_labels(folder: Path) -> None:
    (folder / "slurm-1201.out").write_text(mixed(lambda rank: f"{rank}: ") + "srun: error: gpu-01: task 2: Exited with exit code 1\n")  # noqa: E501  # fmt: skip


def slurm_plain(folder: Path) -> None:
    plain = [line for rank in (CULPRIT, 0, 1, 3) for line in lines_of(rank)]
    (folder / "slurm-1202.out").write_text(
        "\n".join(plain) + "\nsrun: error: gpu-01: task 2: Exited with exit code 1\n"
    )


def pods(folder: Path) -> None:
    for rank in range(RANKS):
        own = "".join(f"2026-03-01T08:30:0{5 if rank == CULPRIT else 8}.1Z [rank{rank}]: {line}\n" for line in lines_of(rank))  # noqa: E501  # fmt: skip
        (folder / f"job-worker-{rank}.log").write_text(own)


def kubectl(folder: Path) -> None:
    (folder / "pods.log").write_text(mixed(lambda rank: f"[pod/job-worker-{rank}/pytorch] [rank{rank}]: "))


def ray(folder: Path) -> None:
    label = mixed(lambda rank: f"(WorkerDict pid={4710 + rank}, ip=10.0.0.{rank}) [rank{rank}]: ")
    end = "ray.exceptions.RayTaskError(IndexError): ray::WorkerDict.update() (pid=4712, ip=10.0.0.2)\n"
    (folder / "driver.log").write_text(label + end)


@pytest.mark.parametrize("form", [prefixed, per_rank, slurm_labels, pods, kubectl, ray])
def test_rank_and_cause_are_named(tmp_path: Path, form: Callable[[Path], None]) -> None:
    form(tmp_path)
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.status, first.ranks, first.cause) == ("fired", (CULPRIT,), "exception")
    assert "IndexError" in first.summary
    assert first.evidence["victims"] == [0, 1, 3]


@pytest.mark.parametrize("form", [tee, slurm_plain])
def test_without_labels_the_cause_is_named_and_nobody_is_blamed_wrongly(
    tmp_path: Path, form: Callable[[Path], None]
) -> None:
    form(tmp_path)
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.cause, set(first.ranks) <= {CULPRIT}) == ("exception", True)
    assert "IndexError" in first.summary


def on_screen(text: str, width: int, *, is_padded: bool) -> str:
    """The text as a terminal of this width shows it."""
    rows = [line[at : at + width] for line in text.splitlines() for at in range(0, max(len(line), 1), width)]
    return "".join(f"{row.ljust(width) if is_padded else row}\n" for row in rows)


@pytest.mark.parametrize("width", [64, 75, 80, 100, 120, 200])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_log_copied_from_a_screen_is_read_as_it_was_written(tmp_path: Path, width: int, is_padded: bool) -> None:
    text = "".join(
        f"[E ProcessGroupNCCL.cpp:9{rank}] Some NCCL operations have failed or timed out. Due to the asynchronous "
        f"kernels, later operations might run on incomplete data.\n[E ProcessGroupNCCL.cpp:915] [Rank {rank}] NCCL "
        f"watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum=53117, OpType=REDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=1800000) ran for 180{rank}113 "
        "milliseconds before timing out.\nterminate called after throwing an instance of 'E'\n  what():  "
        f"[Rank {rank}] NCCL watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=53117, OpType=REDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=1800000)\n"
        for rank in (0, 1, 3)
    )
    whole = diagnosed(tmp_path, "job.log", text)
    assert whole.fired[0].ranks == (2,)
    shown = diagnosed(tmp_path, "job.log", on_screen(text, width, is_padded=is_padded))
    assert (shown.fired[0].cause, shown.verdict) == (whole.fired[0].cause, whole.verdict)


def test_lines_of_one_length_are_not_joined(tmp_path: Path) -> None:
    lines = [f"{n:05d} the loss of this step is {4 - n / 20:.4f} and nothing follows it here" for n in range(40)]
    text = "\n".join([*lines, "-" * len(lines[0]), "KeyError: 'label'", ""]).encode()
    assert unwrapped(text) == text
