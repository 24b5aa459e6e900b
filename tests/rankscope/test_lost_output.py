"""A full disk behind standard output is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.depth import later
from tests.factories import make_run

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
ONE_OF_THEM = later("both closed: beside it; one: of `version`")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["version"], ["analyze", "--help"]])
def test_a_full_disk_is_reported_in_one_line(arguments: list[str], unbuffered: str) -> None:
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "rankscope", *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=100, check=False
        )
    assert done.stderr == "rankscope: standard output: No space left on device. Not everything was written.\n"
    assert done.returncode == 74


def _in_shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ["/bin/sh", "-c", script, sys.executable]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("command", "stream"),
    [
        pytest.param(command, stream, marks=[] if command == "version" or stream == "<&- >&-" else ONE_OF_THEM)
        for command in ("top runs/latest", "mcp runs", "version")
        for stream in ("<&-", ">&-", "<&- >&-")
    ],
)
def test_closed_streams_are_ignored(tmp_path: Path, command: str, stream: str) -> None:
    make_run(tmp_path, ranks=1, steps=5)
    done = _in_shell(f'exec "$0" -m rankscope {command} </dev/null {stream}', tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["doctor", "compare a b", "prepare text --tokenizer bytes --out x"])
def test_a_deleted_folder_is_one_line(tmp_path: Path, command: str) -> None:
    done = _in_shell(f'mkdir gone; cd gone; rmdir ../gone; exec "$0" -m rankscope {command}', tmp_path)
    assert (done.returncode, done.stderr) == (2, "rankscope: the current folder was deleted: cd to another one\n")


@pytest.mark.parametrize(
    "command",
    [
        ["analyze", "runs/latest"],
        ["explain"],
        pytest.param(["fleet", "runs"], marks=later("beside it: the handler is that of all commands")),
    ],
)
def test_a_closed_pipe_ends_the_command_with_the_sigpipe_code(tmp_path: Path, command: list[str]) -> None:
    """Not 1: that is what `--fail-on` found."""
    make_run(tmp_path, ranks=1, steps=5)
    reader, writer = os.pipe()
    os.close(reader)
    words, environment = [sys.executable, "-m", "rankscope", *command], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
