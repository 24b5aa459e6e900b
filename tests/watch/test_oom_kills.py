"""The kernel's own out-of-memory killer, in a control group with a small limit, and what is said of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from watch.health.oom_kills import ROOT, _group_file

LIMIT_BYTES = 64 << 20
# The launcher's part: it counts, a child of it asks for more than there is.
PROGRAM = """
import subprocess, sys
from watch.health.oom_kills import OomCounter
counter = OomCounter()
print(repr(counter.since()))
child = subprocess.run([sys.executable, "-c", "held = bytearray(int(sys.argv[1]))".join(("import sys; ", "")), "%d"])
print(child.returncode, counter.since())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with little memory, below our own."""
    path = _group_file().parent / f"rankscope-{os.getpid()}"
    try:
        path.mkdir()
        limit = "memory.limit_in_bytes" if (ROOT / "memory") in path.parents else "memory.max"
        (path / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.rmdir()
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield path
    path.rmdir()


@pytest.mark.parametrize(
    ("size_bytes", "told"),
    [(4 * LIMIT_BYTES, "-9 memory limit of the control group"), (1, "0 ")],
)
def test_a_kill_by_the_kernel_is_distinguished(group: Path, size_bytes: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % size_bytes],
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
    )
    assert done.stdout.splitlines() == ["''", told], done.stderr
