"""An answer to an agent: compact JSON, rounded numbers, limited in length, with a list of what was cut.

compact({"rows": rows})         # '{"rows":[...],"cut":["rows: 120 of 200 shown"]}'
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from analyzers.report.json import plain

__all__ = ["MAX_ANSWER_CHARS", "compact"]

MAX_ANSWER_CHARS = 16_000
"""Maximum length of one answer: about four thousand tokens."""
DIGITS = 6
"""Significant digits of a number that is not whole."""


def compact(answer: Any) -> str:
    """The answer as JSON of at most `MAX_ANSWER_CHARS`; a text stays a text."""
    if isinstance(answer, str):
        return answer if len(answer) <= MAX_ANSWER_CHARS else f"{answer[:MAX_ANSWER_CHARS]}\n(cut)"
    found = {"answer": _rounded(plain(answer))}
    sizes: dict[str, int] = {}
    while len(text := _text(found["answer"], sizes, found)) > MAX_ANSWER_CHARS:
        path, holder, key = max(_parts(found), key=lambda part: _length(part[1][part[2]]))
        value = holder[key]
        sizes.setdefault(path, len(value))
        keep = max(1, min(len(value) - 1, int(len(value) * 0.9 * MAX_ANSWER_CHARS / len(text))))
        if isinstance(value, dict):
            holder[key] = dict(list(value.items())[:keep])
        else:
            holder[key] = value[:keep]
    return text


def _text(answer: Any, sizes: dict[str, int], found: dict[str, Any]) -> str:
    if sizes and isinstance(answer, dict):
        kept = {path: holder[key] for path, holder, key in _parts(found, least=1)}
        cut = [f"{path}: {len(kept[path])} of {size} shown" for path, size in sizes.items() if path in kept]
        answer = answer | {"cut": [*answer.get("cut", []), *cut]}
    return json.dumps(answer, separators=(",", ":"), ensure_ascii=False)


def _parts(value: Any, path: str = "", *, least: int = 2) -> Iterator[tuple[str, Any, Any]]:
    """(path, holder, key) of each text, list and mapping of at least so many items within the answer."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        where = "" if not path and key == "answer" else f"{path}.{key}" if path else str(key)
        if where and key != "cut" and isinstance(item, (str, list, dict)) and len(item) >= least:
            yield where, value, key
        yield from _parts(item, where, least=least)


def _length(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
