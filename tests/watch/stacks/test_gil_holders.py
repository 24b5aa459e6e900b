from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_for
from watch.processes import os_state
from watch.stacks import gil_holders as module
from watch.stacks.gil_holders import gil_holders
from watch.stacks.pyspy import StacksError, program

SCRIPT = """
import ctypes, time
def lock():
    take, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    take(mutex); print("ready", flush=True); take(mutex)
def sleep():
    print("ready", flush=True); time.sleep(100)
def loop():
    print("ready", flush=True)
    while True: pass
{what}()
"""


@pytest.fixture
def pids() -> Iterator[dict[str, int]]:
    """Processes that hold Python's lock asleep, sleep without it, and run with it."""
    started = {
        what: subprocess.Popen([sys.executable, "-c", SCRIPT.format(what=what)], stdout=subprocess.PIPE)
        for what in ("lock", "sleep", "loop")
    }
    for process in started.values():
        assert process.stdout is not None
        process.stdout.readline()
    for what in ("lock", "sleep"):  # it says so just before
        wait_for(lambda pid=started[what].pid: os_state(pid)[0] == "S", f"{what} asleep")  # type: ignore[misc]
    yield {what: process.pid for what, process in started.items()}
    for process in started.values():
        process.kill()
        process.communicate()


def test_only_the_process_that_sleeps_with_the_gil_is_named(
    pids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        spied = subprocess.run([program(), "dump", "--pid", str(pids["sleep"])], capture_output=True, check=False)
    except StacksError:
        pytest.skip("py-spy is not installed")
    if spied.returncode:
        pytest.skip("py-spy may not look into processes here")
    monkeypatch.setattr("watch.stacks.gil_holders.SAMPLE_LIMIT_S", 60.0)
    assert gil_holders({7: pids["lock"], 8: pids["sleep"], 9: pids["loop"]}) == [7]


@pytest.mark.parametrize(
    "script", ["echo 'Permission denied' >&2; exit 1", "echo not json", "echo '[{\"thread\": 1}]'", "sleep 60"]
)
def test_no_gil_holder_without_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake = tmp_path / "py-spy"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(module, "program", lambda: str(fake))
    monkeypatch.setattr(module, "SAMPLE_LIMIT_S", 0.2)
    assert gil_holders({0: 1}) == []


def test_no_gil_holder_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise StacksError("py-spy is not installed")

    monkeypatch.setattr(module, "program", missing)
    assert gil_holders({0: 1}) == []
