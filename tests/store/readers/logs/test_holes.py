"""Text logs with runs of zero bytes: written before their size was known, or torn by a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.readers.formats import format_of
from store.readers.logs.scan import read_log

STEPS = b"".join(b"step %d loss %.2f time 80 ms\n" % (step, 3 - step / 100) for step in range(1, 60))
ERROR = (
    b"Traceback (most recent call last):\n"
    b'  File "/job/fit.py", line 4, in <module>\n    main()\n'
    b"OSError: [Errno 28] No space left on device\n"
)
ZEROS = bytes(70_000)
HOLES = {
    "behind": STEPS + ERROR + ZEROS,
    "before": ZEROS + STEPS + ERROR,
    "far before": bytes(3 << 20) + STEPS + ERROR,
    "between": STEPS[:900] + ZEROS + STEPS[900:] + ERROR,
    "in each line": STEPS.replace(b"\n", b"\0\n") + ERROR,
}


@pytest.mark.parametrize("where", HOLES)
def test_a_log_with_holes_is_read_and_its_lines_keep_their_numbers(tmp_path: Path, where: str) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(HOLES[where])
    assert format_of(path) == "log"
    log = read_log(path)
    events = [(event.kind, event.line, event.fields["type"]) for event in log.events if event.kind == "exception"]
    assert events[0] == ("exception", 60, "OSError")
    assert len({step.step_line.step for step in log.steps} & set(range(1, 60))) >= 58  # one line may be torn


NUMBERS = b'{"tokens"}' + bytes(64) + (10).to_bytes(8, "little") * 400


@pytest.mark.parametrize(
    "content",
    [ZEROS, b"\x93NUMPY\x01\0v\0{'descr': '<f4'}\n" + ZEROS, b"\x7fELF\n\n\n\n" + ZEROS * 2, NUMBERS],
)
def test_zeros_alone_and_binaries_are_no_log(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    assert format_of(path) is None
