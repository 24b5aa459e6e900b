"""Tracebacks of several exceptions in a log: the one that was raised is quoted, with the one that it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.analyzers.evidence.written import diagnosed

CAUSED = "The above exception was the direct cause of the following exception:"
HANDLED = "During handling of the above exception, another exception occurred:"


def part(error: str, path: str, line: int) -> list[str]:
    return ["Traceback (most recent call last):", f'  File "{path}", line {line}, in read', "    do()", error]


def chain(join: str, first: str, last: str) -> list[str]:
    return [*part(first, "/app/data/store.py", 88), "", join, "", *part(last, "/app/data/loader.py", 31)]


@pytest.mark.parametrize("join", [CAUSED, HANDLED])
@pytest.mark.parametrize("prefix", ["[rank2]: ", ""])
def test_the_raised_exception_is_named_with_its_origin(tmp_path: Path, join: str, prefix: str) -> None:
    lines = chain(join, "KeyError: 'shard-00017'", "data.loader.DatasetCorrupted: cannot read shard-00017")
    (finding,) = diagnosed(tmp_path, "train.log", "".join(f"{prefix if line else ''}{line}\n" for line in lines)).fired
    who = "Rank 2" if prefix else "A rank that the log does not name"
    assert finding.summary == (
        f"{who} raised DatasetCorrupted: cannot read shard-00017 (data/loader.py:31 in read, after KeyError: "
        "'shard-00017')."
    )
    assert finding.evidence["raised_at"] == "data/loader.py:31 in read"


def test_an_error_of_a_pools_worker_is_placed_where_the_worker_raised_it(tmp_path: Path) -> None:
    worker = part("ValueError: record 41 has no label", "/app/data/parse.py", 12)
    lines = ["multiprocessing.pool.RemoteTraceback: ", '"""', *worker, '"""', "", CAUSED, ""]
    lines += part("ValueError: record 41 has no label", "/app/prepare.py", 70)
    (finding,) = diagnosed(tmp_path, "prepare.log", "\n".join(lines) + "\n").fired
    assert "record 41 has no label (data/parse.py:12 in read)." in finding.summary
    assert finding.evidence["raised_at"] == "data/parse.py:12 in read"


def test_three_exceptions_name_the_last_and_the_first(tmp_path: Path) -> None:
    lines = chain(CAUSED, "OSError: [Errno 61] no data available", "app.ShardError: shard 3")
    lines += ["", HANDLED, "", *part("app.EpochError: epoch 2", "/app/train.py", 140)]
    (finding,) = diagnosed(tmp_path, "train.log", "".join(f"[rank1]: {line}\n" for line in lines)).fired
    assert "EpochError: epoch 2 (app/train.py:140 in read, after OSError: [Errno 61]" in finding.summary
    assert "ShardError" not in finding.summary


def test_a_known_cause_below_another_exception_stays_the_cause(tmp_path: Path) -> None:
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    text = "".join(f"[rank1]: {line}\n" for line in chain(CAUSED, memory, "app.EpochError: epoch 2"))
    assert diagnosed(tmp_path, "train.log", text).fired[0].cause == "out_of_memory"


def test_a_lost_peer_does_not_hide_the_exception_before_it(tmp_path: Path) -> None:
    lost = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.7]:5026"
    text = "".join(f"[rank1]: {line}\n" for line in chain(HANDLED, "ValueError: bad sample 7", lost))
    assert "ValueError: bad sample 7" in diagnosed(tmp_path, "train.log", text).fired[0].summary


def test_errors_of_two_successive_programs_are_not_a_chain(tmp_path: Path) -> None:
    lines = [*part("KeyError: 'a'", "/app/a.py", 1), "", "Starting again", "", *part("app.B: b", "/app/b.py", 2)]
    text = "".join(f"{line}\n" for line in lines)
    assert all("after KeyError" not in one.summary for one in diagnosed(tmp_path, "train.log", text).findings)


def checkpoint(rank: int, error: str) -> list[str]:
    """What torch.distributed.checkpoint raises on every rank, if one could not read its part."""
    own = part(error, "/venv/torch/distributed/checkpoint/filesystem.py", 640)
    summary = f"torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([{rank}])"
    return [*part(summary, "/job/resume.py", 12), f"{own[0]} (RANK {rank})", *own[1:]]


@pytest.mark.parametrize("prefix", ["[rank{}]: ", ""])
def test_an_error_of_a_distributed_checkpoint_is_that_of_the_rank_in_its_head(tmp_path: Path, prefix: str) -> None:
    lines = checkpoint(5, "KeyError: 'optimizer.state.exp_avg'")
    text = "".join(f"{prefix.format(rank)}{line}\n" for rank in range(8 if prefix else 1) for line in lines)
    (finding,) = diagnosed(tmp_path, "train.log", text).fired
    assert (finding.status, finding.ranks) == ("fired", (5,))
    assert "KeyError: 'optimizer.state.exp_avg'" in finding.summary


@pytest.mark.parametrize("error", ["zlib.error: Error -3 while decompressing", "app._SampleError: sample 7"])
def test_an_error_class_may_begin_in_lower_case(tmp_path: Path, error: str) -> None:
    (finding,) = diagnosed(tmp_path, "train.log", "\n".join(part(error, "/job/data.py", 4)) + "\n").fired
    assert error.removeprefix("app.") in finding.summary


@pytest.mark.parametrize("error", ["_pickle.UnpicklingError: pickle data was truncated", "EOFError: Ran out of input"])
def test_a_spawned_process_without_its_task_is_not_a_damaged_file(tmp_path: Path, error: str) -> None:
    child = [
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 132, in m',
    ]
    child += ["    self = reduction.pickle.load(from_parent)", error]
    parent = part("ValueError: no corpus at /data/c4", "/job/train.py", 20)
    (finding,) = diagnosed(tmp_path, "train.log", "\n".join([*child, *parent, ""])).fired
    assert finding.cause == "exception"
    assert "no corpus" in finding.summary
    (finding,) = diagnosed(tmp_path, "train.log", "\n".join([*child, ""])).fired
    assert (finding.cause, finding.status) == ("data_worker", "suspect")


def test_gradients_that_differ_between_ranks_are_the_cause_though_all_are_finite(tmp_path: Path) -> None:
    error = "FloatingPointError: Fatal error: gradients are inconsistent between workers. Try --ddp-backend=legacy_ddp."
    norms = "-" * 80 + "\ngrad_norm across the workers:\n{}\n" + "-" * 80 + "\n"
    text = "\n".join(part(error, "/job/fairseq/trainer.py", 1402)) + "\n"
    (finding,) = diagnosed(tmp_path, "train.log", text + norms.format("rank   0 = 4.1\nrank   1 = 3.9")).fired
    assert finding.cause == "exception"
    assert "gradients are inconsistent between workers" in finding.summary
    (finding,) = diagnosed(tmp_path, "train.log", text + norms.format("rank   0 = 4.1\nrank   1 = nan")).fired
    assert (finding.kind, finding.ranks) == ("non_finite", (1,))


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/job/fit.py", line 9, in <module>
  |     run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/job/reader.py", line 4, in fetch
    |     raise KeyError(name)
    | KeyError: 'part-9'
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/job/reader.py", line 4, in fetch
    |     raise KeyError(name)
    | KeyError: 'part-4'
    +------------------------------------
"""


@pytest.mark.parametrize(("prefix", "ranks"), [("", ()), ("[rank3]: ", (3,))])
def test_the_errors_of_an_exception_group_are_read(tmp_path: Path, prefix: str, ranks: tuple[int, ...]) -> None:
    text = "".join(f"{prefix}{line}\n" for line in GROUP.splitlines())
    (found,) = diagnosed(tmp_path, "job.log", text).fired
    assert (found.status, found.ranks) == ("fired", ranks)
    assert "raised KeyError: 'part-9' (job/reader.py:4 in fetch)" in found.summary


LINES = [
    "Traceback (most recent call last):\n",
    '  File "/job/reader.py", line 4, in fetch\n',
    "KeyError: 'part-9'\n",
]


@pytest.mark.parametrize("quoted", [repr(LINES), f"failed: {''.join(LINES)!r}", json.dumps({"error": "".join(LINES)})])
def test_a_traceback_that_a_line_quotes_is_read(tmp_path: Path, quoted: str) -> None:
    (found,) = diagnosed(tmp_path, "job.log", f"[rank3]: {quoted}\n").fired
    assert found.ranks == (3,)
    assert "raised KeyError: 'part-9' (job/reader.py:4 in fetch)" in found.summary


def test_an_error_that_ray_could_not_unpickle_is_read_from_its_text(tmp_path: Path) -> None:
    driver = part("ray.exceptions.UnserializableException: Failed to deserialize exception.", "/app/main.py", 7)
    task = "ray.exceptions.RayTaskError: ray::Rollout.run() (pid=41, ip=10.0.0.2)"
    original = [task, *part("app.QuotaError: no tokens left for this key", "/app/rollout.py", 52)[1:]]
    (finding,) = diagnosed(tmp_path, "job.log", "\n".join([*driver, "Original exception:", *original])).fired
    assert "raised QuotaError: no tokens left for this key (app/rollout.py:52 in read)" in finding.summary
    bare = "\n".join([*driver, "Original exception:", "app.QuotaError: no tokens left for this key"])
    assert (
        "no tokens left for this key (app/main.py:7 in read)" in diagnosed(tmp_path, "job.log", bare).fired[0].summary
    )
