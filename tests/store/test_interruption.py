"""A signal in the middle of a query ends what asked it, and is no error of that query."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store.database import connect_memory, interruptible
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
ENDLESS = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"

SETUP = f"""
import signal

from analyzers import diagnose
from store.database import connect_memory
from store.reader import Store

signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job begins with it ignored
# With more threads DuckDB looks for signals only when this one has something to compute.
store = Store(connect_memory(threads=1), "a store")

def ask():
    print("asking", flush=True)
    store.rows("{ENDLESS}")
"""

BY_A_QUERY = SETUP + "ask()"

BY_AN_ANALYSIS = f"""{SETUP}
class Endless:
    kinds, records = ("straggler",), "all"

    @staticmethod
    def run(source, scope):
        ask()

diagnose.analyses = lambda: [Endless]
diagnose.diagnose(store, {{}})
"""


def processor_s(pid: int) -> float:
    """Seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("program", [BY_A_QUERY, BY_AN_ANALYSIS])
def test_ctrl_c_ends_what_asks(program: str) -> None:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        try:
            assert asking.stdout.readline() == "asking\n"
            began_s = processor_s(asking.pid)
            wait_for(lambda: processor_s(asking.pid) > began_s + 0.3, "a query that computes")
            asking.send_signal(signal.SIGINT)
            _, said = asking.communicate(timeout=100)
        finally:
            asking.kill()
    assert asking.returncode == -signal.SIGINT, said
    assert said.splitlines()[-1] == "KeyboardInterrupt"


def test_a_signal_while_columns_are_read_is_no_error_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB reads columns through numpy, and makes a `duckdb.Error` of what is raised there."""
    read = np.ma.getdata

    def read_and_be_asked_to_end(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return read(*arguments, **options)

    monkeypatch.setattr(np.ma, "getdata", read_and_be_asked_to_end)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # torch's launcher sets one, in other tests
    try:
        with connect_memory(threads=1) as connection, pytest.raises(KeyboardInterrupt), interruptible():
            connection.register("columns", {"value": np.ma.masked_array(np.arange(3))})
    finally:
        signal.signal(signal.SIGINT, before)
