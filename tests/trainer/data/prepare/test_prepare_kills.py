"""A preparation that is killed again and again ends with the bytes of one that was not."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.data.prepare.prepared_folders import (
    contents,
    documents,
    documents_in,
    prepare_sources,
    small_tokenizer,
    write_jsonl,
)
from tests.waiting import wait_for
from trainer.data.prepare.prepare import PrepareRequest, Progress, prepare
from trainer.data.token_folder import DataError

ROOT = Path(__file__).parents[4]
SHARD_BYTES = 6_000
NUM_DOCUMENTS = 900
PROGRAM = """
import multiprocessing, os, signal, sys
from pathlib import Path
from trainer.data.prepare.prepare import PrepareRequest, prepare
from trainer.data.token_folder import DataError

if __name__ == "__main__":
    *sources, tokenizer, shard_bytes, out, stop_at = sys.argv[1:]
    stops = [int(stop_at)] if stop_at != "0" else []

    def stand_still(progress):
        # Once, with the workers anywhere in a shard, until the standard input ends.
        if stops and progress.shards_done >= stops[0]:
            stops.clear()
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGSTOP)
            print("there", flush=True)
            sys.stdin.read()

    request = PrepareRequest(sources=sources, tokenizer=tokenizer, out=Path(out), shard_bytes=int(shard_bytes))
    try:
        prepare(request, num_processes=2, on_progress=stand_still)
    except DataError as error:
        sys.exit(str(error))
"""


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_until_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(_is_running(pid) for pid in pids), f"the end of {pids}, whose parent has ended")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.timeout(200)
def test_killed_preparation_ends_with_the_same_bytes(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    sources = [str(write_jsonl(tmp_path / f"{seed}.jsonl", documents(NUM_DOCUMENTS, seed=seed))) for seed in range(2)]
    out = tmp_path / "killed"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), *sources, tokenizer, str(SHARD_BYTES), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    random_ = random.Random(22)
    worker_message, kept = "", 0
    for number in range(3):
        errors = (tmp_path / f"errors-{number}.txt").open("w+")
        process = subprocess.Popen(
            [*command, str(kept + random_.randint(1, 4))], env=environment, stderr=errors, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n", "it ended before it was killed: the input is too small"
        workers = [pid for pid in children_of(process.pid) if "spawn_main" in _command_line(pid)]
        assert len(workers) == 2
        os.kill(workers[1] if number == 1 else process.pid, signal.SIGKILL)
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
        process.stdin.close()
        process.wait(100)
        process.stdout.close()
        if number == 1:
            errors.seek(0)
            worker_message = errors.read()
        errors.close()
        wait_until_gone(workers)
        assert not (out / "manifest.json").exists()
        kept = len(list(out.glob("shard-*.json")))
    assert "ended by signal 9 (SIGKILL)" in worker_message
    assert "then run the same command: it continues" in worker_message

    resumed = subprocess.run([*command, "0"], env=environment, check=False, timeout=100)
    assert resumed.returncode == 0
    prepare_sources(tmp_path / "whole", *sources, tokenizer=tokenizer, shard_bytes=SHARD_BYTES)
    assert contents(out) == contents(tmp_path / "whole")
    assert documents_in(out) == [text for seed in range(2) for text in documents(NUM_DOCUMENTS, seed=seed)]


def test_a_real_time_signal_that_ended_an_encoder_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "source.jsonl", documents(NUM_DOCUMENTS))

    def end_encoders(progress: Progress) -> None:
        for encoder in multiprocessing.active_children():
            assert encoder.pid is not None
            os.kill(encoder.pid, signal.SIGRTMIN + 10)

    request = PrepareRequest(sources=[str(source)], tokenizer="bytes", out=tmp_path / "out", shard_bytes=SHARD_BYTES)
    number = int(signal.SIGRTMIN) + 10  # not that of the stacks, which a closed recorder ignores
    with pytest.raises(DataError, match=rf"ended by signal {number} \(SIGRTMIN\+10\); if memory ran out"):
        prepare(request, num_processes=2, on_progress=end_encoders)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
