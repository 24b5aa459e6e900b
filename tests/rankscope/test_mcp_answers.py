"""Answers to an agent: bounded, compact, and what is cut is said."""

from __future__ import annotations

import json

import pytest

from rankscope.mcp_server.server import MAX_ANSWER_CHARS, compact


@pytest.mark.parametrize(
    "answer",
    [
        {"rows": [[n, "x" * 50] for n in range(5_000)]},
        {"text": "y" * 100_000, "rows": [1, 2]},
        {f"file-{n}": "z" * 3_000 for n in range(40)},
        {"deep": {"deeper": {"list": list(range(50_000))}}},
        {"many": {str(n): n for n in range(10_000)}},
        {"lists": [["a" * 100] * 100 for _ in range(10)]},
    ],
)
def test_an_answer_is_bounded_and_says_what_was_cut(answer: dict[str, object]) -> None:
    text = compact(answer)
    assert len(text) <= MAX_ANSWER_CHARS
    assert json.loads(text)["cut"]
    assert len(text) > MAX_ANSWER_CHARS // 4, "no more is cut than must be"


def test_numbers_are_short_and_whole_ones_exact() -> None:
    assert compact({"a": 1 / 3, "ns": 1764140096123456789, "nan": float("nan")}) == (
        '{"a":0.333333,"ns":1764140096123456789,"nan":null}'
    )
