"""SIGTERM and SIGHUP end a command with the signal's exit code; what it opened is closed, and `nohup` is respected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import os, signal, sys
from rankscope.process_end.end_signals import run_to_signal

def command():
    try:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        for _ in range(10):
            signal.sigtimedwait([], 0.01)
        print("went on")
    finally:
        print("closed")
        if sys.argv[1] == "error":  # as a library makes of what a handler raised
            raise RuntimeError("Query interrupted")

def of_typer():
    try:
        command()
    except KeyboardInterrupt:
        return 130

def quiet():  # closes as it does at its end
    try:
        command()
    except KeyboardInterrupt:
        return None

def in_a_callback():  # where Python ignores what is raised
    class Sent:
        def __del__(self):
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    Sent()
    try:
        signal.sigtimedwait([], 60)
        print("went on")
    finally:
        print("closed")

def in_a_string():  # as where a module makes its classes
    exec("command()")

if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
chosen = {
    "of_typer": of_typer, "in_a_string": in_a_string, "quiet": quiet, "in_a_callback": in_a_callback,
}.get(sys.argv[1], command)
sys.exit(run_to_signal(chosen))
"""


def _run(how: str, name: str) -> tuple[int, list[str], str]:
    command = [sys.executable, "-c", COMMAND, how, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout.split("\n")[:-1], done.stderr


@pytest.mark.parametrize("how", ["plain", "error", "of_typer", "in_a_string", "quiet", "in_a_callback"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_the_code_is_the_signals_and_what_was_opened_is_closed(how: str, name: str) -> None:
    assert _run(how, name) == (128 + getattr(signal, name), ["closed"], "")


@pytest.mark.parametrize("how", ["error", "of_typer"])
def test_ctrl_c_that_a_library_turned_into_an_error_is_one_too(how: str) -> None:
    assert _run(how, "SIGINT") == (130, ["closed"], "")


def test_ctrl_c_while_modules_are_imported_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.sigtimedwait([], 60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [sys.executable, "-m", "rankscope", "version"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_nohup_is_respected() -> None:
    assert _run("nohup", "SIGHUP") == (0, ["went on", "closed"], "")
