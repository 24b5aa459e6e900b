"""What lines, or a file without any, prove of a failed write or a wait: the sentence says no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.wording.explained import next_step
from tests.analyzers.evidence.test_waits_and_ends import waited
from tests.analyzers.evidence.written import diagnosed

FAILED_WRITE = (
    "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/8"
)
TRACE = 'Traceback (most recent call last):\n  File "/srv/train.py", line 90, in <module>\n    {code}\n'
FRAME = (
    '  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 4711, in {name}\n    x()\n'
)


@pytest.mark.parametrize(
    "line",
    [
        f"{FAILED_WRITE}: file write failed",
        "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 8 vs 2",
    ],
)
def test_a_failed_write_is_no_full_disk_unless_a_line_says_so(tmp_path: Path, line: str) -> None:
    text = TRACE.format(code="torch.save(state, path)") + line + "\n"
    (found,) = diagnosed(tmp_path, "job.log", text).fired
    assert found.cause == "file_system"
    assert "could not write a file, and the line does not say why" in found.summary
    assert "quota" in next_step(found)
    full = "OSError: [Errno 28] No space left on device\n"
    for both in (f"tee: out.txt: No space left on device\n{text}", text + TRACE.format(code="save()") + full):
        assert [one.cause for one in diagnosed(tmp_path, "job.log", both).fired] == ["disk_full"]
    (found,) = diagnosed(
        tmp_path, "job.log", text.replace("\n", ": No space left on device\n").replace(":\n", "\n")
    ).fired
    assert found.cause == "disk_full"


@pytest.mark.parametrize(
    ("frame", "error", "text", "step"),
    [
        ("init_process_group", "wait timeout after 9ms, keys: /default_pg/0/7", "Not all ranks joined", "MASTER_ADDR"),
        ("new_group", "wait timeout after 9ms, keys: /2/3", "Not all ranks created a process group", "same order"),
        ("monitored_barrier", "wait timeout after 9ms, keys: /0/3", "Not all ranks reached a barrier", "other ranks"),
        ("barrier", "wait timeout after 9ms, keys: /0/3", "Not all ranks reached a barrier", "other ranks"),
        ("wait", "wait timeout after 9ms, keys: torchelastic/agent/terminal_state/last_members",
         "end of the job", "other nodes"),
        ("wait", "Wait timeout for key(s): /exchanged/3", "A wait for a key of the store timed out", "/exchanged/3"),
    ],
)  # fmt: skip
def test_a_store_timeout_names_what_its_key_or_stack_shows(
    tmp_path: Path, frame: str, error: str, text: str, step: str
) -> None:
    log = TRACE.format(code="main()") + FRAME.format(name=frame)
    (found,) = diagnosed(tmp_path, "job.log", f"{log}torch.distributed.DistStoreError: {error}\n").fired
    assert (found.cause, found.status, found.ranks) == ("rendezvous", "suspect", ())
    assert text in found.summary
    assert step in next_step(found)


@pytest.mark.parametrize(("key", "text"), [(1, "Not all ranks joined the rendezvous"), (4, "created a process group")])
def test_the_number_of_a_store_barrier_separates_a_later_group_from_the_first(
    tmp_path: Path, key: int, text: str
) -> None:
    line = "RuntimeError: Timed out initializing process group in store based barrier on rank: 2, for key: "
    line += f"store_based_barrier_key:{key} (world_size=8, worker_count=7, timeout=0:30:00)\n"
    (found,) = diagnosed(tmp_path, "job.log", line).fired
    assert (found.cause, found.ranks) == ("rendezvous", ())
    assert text in found.summary


def test_a_rank_that_is_named_for_its_silence_is_said_to_have_an_empty_file(tmp_path: Path) -> None:
    for rank in (1, 2, 3):
        (tmp_path / f"rank_{rank}.log").write_text(waited(rank))
    silent = tmp_path / "rank_0.log"
    silent.write_text("")
    (found,) = diagnose_files([tmp_path]).fired
    assert (found.cause, found.ranks) == ("not_entered", (0,))
    assert "The file of rank 0 (rank_0.log) is empty. Suspected" in found.summary
    silent.write_text("loading the data\n")
    (found,) = diagnose_files([tmp_path]).fired
    assert found.ranks == (0,)
    assert "empty" not in found.summary


def test_files_of_torchruns_log_folder_are_empty_only_together(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
        for name in ("stdout.log", "stderr.log"):
            text = waited(rank) if name == "stderr.log" and rank != 1 else ""
            (tmp_path / "attempt_0" / str(rank) / name).write_text(text)
    (found,) = diagnose_files([tmp_path]).fired
    assert found.ranks == (1,)
    assert "The files of rank 1 (attempt_0/1/stderr.log and 1 more) are empty. Suspected" in found.summary
    (tmp_path / "attempt_0" / "1" / "stdout.log").write_text("loading the data\n")
    (found,) = diagnose_files([tmp_path]).fired
    assert "empty" not in found.summary
