"""A source that asks the store each short question once, for the length of one diagnosis.

    asked = Remembered(store)
    asked.rows("SELECT 1 FROM steps LIMIT 1")    # some thirty analyses ask whether there are steps

Of a small run nearly half of the questions of a diagnosis were asked before, and planning one takes longer than
answering it. A diagnosis is of the records as they were when it began to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from analyzers.source import Source

__all__ = ["Remembered"]

_MAX_ROWS = 1_000
"""Longer answers are not kept: they are few, and large."""


class Remembered:
    """Answers of `rows` are kept; those of `query` are arrays that may be large, and are seldom asked twice."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._answers: dict[tuple[str, str], list[tuple[Any, ...]]] = {}

    def query(self, sql: str, params: Sequence[Any] = ()) -> dict[str, npt.NDArray[Any]]:
        return self._source.query(sql, params)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        question = (sql, repr(params))
        if (known := self._answers.get(question)) is not None:
            return list(known)
        found = self._source.rows(sql, params)
        if len(found) <= _MAX_ROWS:
            self._answers[question] = list(found)
        return found

    def has(self, table: str) -> bool:
        return self._source.has(table)
