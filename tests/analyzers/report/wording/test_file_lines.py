from __future__ import annotations

from typing import Any

import pytest

from analyzers.report.wording.file_lines import file_lines


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ({}, []),
        ({"files_read": {"text log": 1}}, []),
        ({"files_read": {"text log": 3, "flight-recorder dump": 8}}, [("Read", "11 files, judged as one job")]),
        ({"files_read": {"text log": 2}, "input": "logs", "file_problems": [{"path": "x", "problem": "is empty"}]},
         [("Read", "2 files, judged as one job"), ("Left out", "x: is empty")]),
    ],
)  # fmt: skip
def test_a_folder_with_the_logs_of_two_jobs_is_seen_to_be_read_as_one(
    facts: dict[str, Any], lines: list[tuple[str, str]]
) -> None:
    assert file_lines(facts) == lines
