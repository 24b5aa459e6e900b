"""Processes that a tested process starts are forked if they would import much, and behave like interpreters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from probes.tape.events import read_events
from tests.factories import make_run
from tests.forked import ROOT, run_python
from tests.local_forks import python_arguments

STARTS_WATCH = """
import os, subprocess, sys
reader, writer = os.pipe()
command = [sys.executable, "-P", "-u", "-m", "watch.node_process", sys.argv[1], "--heartbeat-fd", str(writer)]
process = subprocess.Popen(
    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[writer],
    start_new_session=True, cwd="/", env={**os.environ, "PYTHONPATH": os.getcwd(), "RANKSCOPE_FAIL_LOUD": "1"},
)
os.close(writer)
stat = open(f"/proc/{process.pid}/stat").read()
parent = int(stat[stat.rindex(")") :].split()[2])
is_fork = b"forking_server" in open(f"/proc/{process.pid}/cmdline", "rb").read()
beat = os.read(reader, 1)
output, _ = process.communicate()
print(is_fork, parent == os.getpid(), beat, os.read(reader, 99).strip(b"."), process.returncode, output)
"""


def test_a_watch_is_a_child_that_beats_and_ends_as_one_that_was_started(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=5)
    done = run_python(["-c", STARTS_WATCH, str(run.path)], cwd=ROOT, forks_python=True)
    assert done.stdout == "True True b'.' b'' 0 b''\n", done.stderr
    kinds = [event["kind"] for event in read_events(run.node_dir(0) / "events.jsonl")[0]]
    assert kinds.count("watch_started") == kinds.count("watch_stopped") == 1
    missing = run_python(["-c", STARTS_WATCH, str(tmp_path / "none")], cwd=ROOT, forks_python=True)
    _, _, answer = missing.stdout.partition(" ")  # it may have ended, and then /proc has no command line of it
    assert answer.startswith("True b'' b'' 2 b'rankscope watch: "), missing.stdout + missing.stderr


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["-P", "-u", "-m", "watch.node_process", "run"], ["-m", "watch.node_process", "run"]),
        (["-m", "rankscope", "run", "-u"], ["-m", "rankscope", "run", "-u"]),
        (["-S", "-E", "-m", "watch.node_process"], None),
        (["-u", "train.py", "-m"], ["train.py", "-m"]),
        (["-m", "some.other"], None),
        (["-u", "train"], None),
        (["-u"], None),
    ],
)
def test_what_imports_little_or_has_other_options_is_an_interpreter(
    words: list[str], arguments: list[str] | None
) -> None:
    assert python_arguments([sys.executable, *words]) == arguments
    assert python_arguments(["another-python", *words]) is None


def test_the_caller_of_a_test_itself_starts_interpreters() -> None:
    done = subprocess.run([sys.executable, "-m", "rankscope", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("rankscope ")
