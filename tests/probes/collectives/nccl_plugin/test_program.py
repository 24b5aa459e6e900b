"""A program without Python: its NCCL calls are recorded, its end and its exit status are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cost.nccl_plugin import compile_driver
from probes.tape.events import read_events
from probes.tape.format.reader import read_segment
from probes.tape.rundir import RunDir
from store.ingest.ingest import Ingester
from store.reader import Store
from tests.forked import run_python
from tests.waiting import wait_for

# A launcher that is asked to end before it knows the child's pid: by then the child has set its trap.
ENDED_EARLY = """
import os, pathlib, signal, subprocess, sys, time
from rankscope.attached_program import main
started = subprocess.Popen
def start(*arguments, **named):
    child = started(*arguments, **named)
    while not pathlib.Path("trapped").exists() and child.poll() is None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    return child
subprocess.Popen = start
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def driver(plugin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "nccl_driver"
    compile_driver(path)
    return path


def start(run: Path, library: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    known = os.environ | {"RANKSCOPE_RUN_DIR": str(run), "RANKSCOPE_NCCL_PLUGIN": str(library)} | environment
    command = [sys.executable, "-m", "rankscope.attached_program", *words]
    return subprocess.Popen(  # the driver of the kill benchmark prints counters in binary
        command, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def kinds(run: Path, rank: int = 0) -> list[str]:
    events, _, skipped = read_events(RunDir(run).rank_dir(0, rank) / "events.jsonl")
    assert not skipped
    return [event["kind"] for event in events]


def test_calls_of_a_program_are_in_the_store(driver: Path, plugin_library: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, plugin_library, str(driver), str(plugin_library), "5", "2", "300", "check", RANK="1",
                    WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")  # fmt: skip
    output, problem = process.communicate(timeout=100)
    assert process.returncode == 0, problem
    assert output.split()  # what the program prints is the program's
    assert kinds(run, 1) == ["rank", "nccl_plugin", "rank_closed"]
    with Ingester(RunDir.open(run)) as ingester:
        ingester.catch_up()
    with Store.open(RunDir.open(run), catch_up=False) as store:
        assert store.rows("SELECT count(*), count(DISTINCT communicator) FROM nccl_calls WHERE rank = 1") == [(600, 2)]
        assert store.rows("SELECT DISTINCT comm_name FROM nccl_communicators ORDER BY 1") == [
            ("group_0",),
            ("group_1",),
        ]


def test_signal_that_ends_the_program_ends_its_parent(driver: Path, plugin_library: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, plugin_library, str(driver), str(plugin_library), "5", "1", "0", "endless", RANK="1",
                    WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")  # fmt: skip
    tape = RunDir(run).rank_dir(0, 1) / "nccl_calls.00000.tape"
    assert process.stdout is not None
    process.stdout.read(80)
    wait_for(lambda: tape.exists() and tape.stat().st_size and len(read_segment(tape).records), "a call on the tape")
    process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait(timeout=100) in (-signal.SIGTERM, -signal.SIGPIPE)
    assert kinds(run, 1) == ["rank", "nccl_plugin"]  # no clean end


def test_signal_while_the_program_is_started_is_passed_on(tmp_path: Path) -> None:
    script = "trap 'exit 7' TERM; touch trapped; for i in $(seq 600); do sleep 0.1; done"
    done = subprocess.run(
        [sys.executable, "-c", ENDED_EARLY, "sh", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"RANKSCOPE_DISABLED": "1"},
        timeout=100,
        check=False,
    )
    assert done.returncode == 7


def test_signal_that_is_ignored_is_ignored_by_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rankscope.attached_program", "sh", "-c", "kill -HUP $$; exit 3"],
        cwd=tmp_path,
        env=os.environ | {"RANKSCOPE_DISABLED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        timeout=100,
        check=False,
    )
    assert done.returncode == 3


def test_program_that_is_not_there(plugin_library: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "run", plugin_library, "/nowhere/a.out", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1",
                    LOCAL_WORLD_SIZE="2")  # fmt: skip
    _, problem = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "cannot run /nowhere/a.out: No such file" in problem


@pytest.mark.slow
def test_command_runs_a_program(driver: Path, plugin_library: Path, tmp_path: Path) -> None:
    command = ["-m", "rankscope", "run", "--nproc-per-node", "2", "--no-python", "--run-dir", "run"]
    words = [*command, str(driver), str(plugin_library), "6", "1", "50", "check"]
    environment = os.environ | {"RANKSCOPE_NCCL_PLUGIN": str(plugin_library)}
    done = run_python(words, cwd=tmp_path, env=environment, forks_python=True)
    assert done.returncode == 0, done.stderr
    assert kinds(tmp_path / "run") == [
        "rank",
        "nccl_plugin",
        "attempt_started",
        "run_started",
        "run_ended",
        "rank_closed",
    ]
    for rank in (0, 1):
        tape = RunDir(tmp_path / "run").rank_dir(0, rank) / "nccl_calls.00000.tape"
        assert len(read_segment(tape).records) == 50
