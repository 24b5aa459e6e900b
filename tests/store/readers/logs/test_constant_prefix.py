"""What stands before every line of a file is learned from its lines, whatever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from store.readers.logs import constant_prefix
from store.readers.logs.constant_prefix import common_prefix
from store.readers.logs.prefix import Prefix
from store.readers.logs.scan import read_log

LINES = (
    'Traceback (most recent call last):',
    '  File "/app/fit.py", line 7, in <module>',
    "    run()",
    '  File "/app/corpus.py", line 31, in row',
    "    return self.table[key]",
    "KeyError: 'label'",
    "Sending process 71 closing signal SIGTERM",
)  # fmt: skip
PREFIXES = (
    "2026-03-01T10:00:0{i}.123456789Z stderr F ",
    "job-worker-0 pytorch ",
    "Mar  1 10:00:0{i} node-7 torchrun[2211]: ",
    "<14>1 2026-03-01T10:00:0{i}Z node7 job 71 - - ",
    "2026-03-01 10:00:0{i},123 - launcher - INFO - ",
    "{i}{i}:01 | algo-1-abcde | ",
    "3: ",
    "TASK[{i}] node-03 >> ",
)  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("first", [0, 3])
def test_a_traceback_behind_any_prefix_has_its_error_and_its_line(tmp_path: Path, prefix: str, first: int) -> None:
    path = tmp_path / "job.log"
    path.write_text(
        "".join(f"{prefix.format(i=i % 10)}{line}\n" for i, line in enumerate(LINES[first:])), encoding="utf-8"
    )
    found = [event for event in read_log(path).events if event.kind == "exception"]
    assert {event.fields["type"] for event in found} == {"KeyError"}
    if first == 0:
        assert any('"/app/corpus.py", line 31' in event.fields["traceback"] for event in found)


def test_lines_with_equal_text_have_no_prefix() -> None:
    assert common_prefix([f"iteration {i}/ 500 | lm loss: {i / 7:.3f} | grad norm: 1.0" for i in range(50)]) is None


def test_a_folder_an_error_code_and_a_counter_are_not_hosts(tmp_path: Path) -> None:
    folder = tmp_path / "Downloads"
    folder.mkdir()
    (folder / "dmesg.txt").write_text("[1.0] Out of memory: Killed process 71 (python)\n", encoding="utf-8")
    log = tmp_path / "job.log"
    log.write_text(
        "EI0006: Getting socket times out.\nepoch1: CUDA out of memory. Tried to allocate 1 GiB\n", encoding="utf-8"
    )
    assert [event.prefix.host for event in read_log(log).events] == [None, None]


def test_the_prefix_of_a_line_is_parsed_once_however_many_tracebacks_it_lies_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank of a job fails, and their tracebacks interleave: each is read past the lines of the others."""
    lines = ["Traceback (most recent call last):", '  File "/job/train.py", line 40, in main', "ValueError: bad"]
    path = tmp_path / "job.log"
    path.write_text("".join(f"[rank{rank}]: {line}\n" for line in lines for rank in range(150)))
    parsed = []
    real = constant_prefix.read_prefix

    def counted(text: str, *others: Any) -> Prefix:
        parsed.append(text)
        return real(text, *others)

    monkeypatch.setattr(constant_prefix, "read_prefix", counted)
    found = read_log(path).events
    assert len({event.rank for event in found if event.kind == "exception"}) == 150
    assert len(parsed) < 5 * 3 * 150
