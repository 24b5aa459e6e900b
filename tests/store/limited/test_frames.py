"""Messages between a process and one that answers it."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import time
from collections.abc import Iterator

import pytest

from store.limited.frames import read_frame, write_frame


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe with file descriptors that `select` cannot take, as in a process with more than 1,024 open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2_000:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2_000), before[1]))
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 1_500) for end in ends]
    for end in ends:
        os.close(end)
    yield high[0], high[1]
    for end in high:
        os.close(end)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_with_many_open_files_is_answered(pipe: tuple[int, int]) -> None:
    write_frame(pipe[1], b"answer", time.monotonic() + 30.0)
    assert read_frame(pipe[0], time.monotonic() + 30.0, max_bytes=100) == b"answer"
    write_frame(pipe[1], b"", math.inf)
    assert read_frame(pipe[0], math.inf, max_bytes=100) == b""


def test_an_answer_that_does_not_come_ends_at_the_deadline(pipe: tuple[int, int]) -> None:
    with pytest.raises(TimeoutError):
        read_frame(pipe[0], time.monotonic() + 0.05, max_bytes=100)
    os.set_blocking(pipe[1], False)
    with pytest.raises(TimeoutError):
        write_frame(pipe[1], b"x" * (1 << 22), time.monotonic() + 0.05)
