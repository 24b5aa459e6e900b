"""Read one JSON object incrementally, its long arrays item by item: a trace of a gigabyte needs a megabyte of memory.

    for key, value, is_item in members(unpacked(path), {"traceEvents"}):
        ...                            # ("schemaVersion", 1, False), ("traceEvents", {...}, True), ...

If the text is truncated or malformed, SourceError is raised after the members before that place were yielded.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from store.readers.untrusted.external_files import SourceError

__all__ = ["members"]

MAX_ITEM_CHARS = 4 << 20
"""Maximum characters of a value or an array item. An event of a trace has a few hundred."""
MAX_MEMBER_CHARS = 96 << 20
"""Maximum characters of a value outside the arrays, such as metadata of the host or call stacks."""
MAX_ITEMS = 12_000_000
NUMBER_TAIL = 2
_SPACE = re.compile(r"[ \t\r\n]*")


class _Text:
    """A window that moves forward over the text."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._scan = json.JSONDecoder().raw_decode
        self.text = ""
        self.at = 0
        self.at_end = False

    def more(self) -> bool:
        """Read another chunk, and drop what was consumed."""
        if self.at_end:
            return False
        chunk = next(self._chunks, None)
        self.at_end = chunk is None
        self.text = self.text[self.at :] + self._decoder.decode(chunk or b"", final=self.at_end)
        self.at = 0
        return True

    def _double(self) -> bool:
        """Double the window, so that a long value is not parsed again from its start with each chunk."""
        wanted, is_more = 2 * (len(self.text) - self.at), False
        while len(self.text) - self.at < wanted and self.more():
            is_more = True
        return is_more

    def peek(self) -> str:
        """Next non-blank character, without consuming it; "" at the end."""
        if self.at < len(self.text) and (char := self.text[self.at]) not in " \t\r\n":
            return char
        skipped = 0
        while True:
            found = _SPACE.match(self.text, self.at)
            before, self.at = self.at, found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            skipped += self.at - before
            if skipped > MAX_ITEM_CHARS:
                raise SourceError("holds megabytes of blanks: no trace does")
            if not self.more():
                return ""

    def take(self, expected: str) -> None:
        """Consume one character. Raises SourceError unless it is `expected`."""
        found = self.peek()
        if found != expected:
            raise SourceError("is cut off" if not found else f"is not a JSON object: expected {expected!r}")
        self.at += 1

    def value(self, max_chars: int = MAX_ITEM_CHARS) -> Any:
        """Parse the next JSON value."""
        self.peek()
        while True:
            try:
                value, end = self._scan(self.text, self.at)
            except RecursionError:
                raise SourceError("is nested too deeply") from None
            except ValueError as error:
                if len(self.text) - self.at > max_chars:
                    raise SourceError("holds a value that is too long, or is not JSON") from None
                if not self._double():
                    cut = isinstance(error, json.JSONDecodeError) and error.pos >= len(self.text) - 1
                    raise SourceError("is cut off or not JSON" if cut else "is not JSON") from None
                continue
            if len(self.text) - end <= NUMBER_TAIL and isinstance(value, (int, float)) and self.more():
                continue  # "1.", "2e+": a number may continue in the next chunk
            self.at = end
            return value


def _open_array(text: _Text) -> Iterator[Any]:
    text.take("[")
    for _ in range(MAX_ITEMS):
        if text.peek() in ("", "]"):
            return
        yield text.value()
        if text.peek() == ",":
            text.take(",")
    raise SourceError(f"holds more than {MAX_ITEMS:,} items: the rest was not read")


def members(chunks: Iterator[bytes], arrays: Collection[str]) -> Iterator[tuple[str, Any, bool]]:
    """Yield (key, value, False) for each member of the object, and (key, item, True) for each item of the named
    arrays. If the text is an array instead of an object, its items are yielded under the first name in `arrays`.
    """
    text = _Text(chunks)
    if text.peek() == "[":  # only the array, whose end may be missing because profilers append events as they go
        yield from ((array, item, True) for array in list(arrays)[:1] for item in _open_array(text))
        return
    text.take("{")
    num_items = 0
    while text.peek() != "}":
        key = text.value()
        if not isinstance(key, str):
            raise SourceError("is not a JSON object: a key is not text")
        text.take(":")
        if key in arrays and text.peek() == "[":
            text.take("[")
            while text.peek() != "]":
                yield key, text.value(), True
                num_items += 1
                if num_items > MAX_ITEMS:
                    raise SourceError(f"holds more than {MAX_ITEMS:,} items: the rest was not read")
                if text.peek() != "]":
                    text.take(",")
            text.take("]")
        else:
            yield key, text.value(MAX_MEMBER_CHARS), False
        if text.peek() != "}":
            text.take(",")
