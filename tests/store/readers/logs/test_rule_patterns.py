"""Patterns of rules take a time that grows slowly with the length of a line, whatever it contains."""

from __future__ import annotations

from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from store.readers.logs.rules import load_rules


def is_any(item: Any) -> bool:
    """True for `.*` and `.*?`."""
    kind, value = item
    repeats = (_constants.MIN_REPEAT, _constants.MAX_REPEAT)
    return bool(kind in repeats and value[1] is _constants.MAXREPEAT and value[2][0][0] is _constants.ANY)


def is_optional(item: Any) -> bool:
    kind, value = item
    return bool(kind in (_constants.MIN_REPEAT, _constants.MAX_REPEAT) and value[0] == 0 and value[1] == 1)


def skips_text(pattern: str) -> bool:
    """True if a pattern without an anchor can begin with any text, perhaps after optional parts."""
    items = [item for item in _parser.parse(pattern) if item[0] is not _constants.ASSERT]
    while items and is_optional(items[0]):
        items = items[1:]
    return bool(items) and is_any(items[0])


def test_a_pattern_that_skips_any_text_is_tried_at_the_start_of_the_line_alone() -> None:
    """Tried from each character, it would find no more, but take the square or the cube of the time."""
    patterns = {rule.pattern.pattern for rule in load_rules() if rule.pattern is not None}
    assert not [pattern for pattern in patterns if skips_text(pattern)]
