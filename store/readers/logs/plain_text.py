"""Convert a log's bytes to plain UTF-8 lines: decode UTF-16, remove colours and runs of zero bytes, unwrap JSON lines.

    for chunk in plain_chunks(unpacked(path)): ...

Docker's json-file, journald's JSON and most collectors write one JSON object per line, some behind a prefix
(`trainer-0 | {...}`); the field that holds the text is determined from the first lines. Only the current line is kept
in memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

__all__ = [
    "encoding_of", "has_holes", "is_endless", "num_holes", "plain_bytes", "plain_chunks", "text_chunks", "windows",
    "without_holes",
]  # fmt: skip

_COLOURS = re.compile(rb"\x1b\[[0-9;?:]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]")
_SHOWN_COLOURS = re.compile(rb"\^\[\[[0-9;?]*[mK]")
"""Escape sequences as `cat -v` and browsers show them."""
_ZEROS = re.compile(rb"\0+")
_HOLE = re.compile(rb"\0{64}")
_LONGEST = 256
"""Maximum bytes of an escape sequence. This many are held back at the end of a chunk, which may split a sequence."""
_RECORD = re.compile(rb"(\]<std(?:out|err)>:[^\r\n]*?)(?=\[\d+,(?:mpirank:)?\d+(?:,[\w.-]{1,64})?\]<std(?:out|err)>:)")
"""Text of an mpirun record before the next record in the same line. The two are separated by a carriage return, which
ends a message but does not count as a new line.
"""
_TEXT_KEYS = ("log", "message", "msg", "MESSAGE", "textPayload", "line")
_TIME_KEYS = ("time", "timestamp", "@timestamp", "ts")
SAMPLE_LINES = 20
MAX_LINE_BYTES = 1 << 20
MAX_BEFORE = 120
"""Maximum bytes before the JSON object in a line."""
CHUNK_BYTES = 4 << 20
BLOCK_BYTES = 256 << 10
"""Bytes kept after a line for its block (such as a traceback): enough even if a thousand ranks interleave theirs."""


def encoding_of(first: bytes) -> str | None:
    """Encoding of a text that is not UTF-8, from its first bytes: a byte order mark, or every other byte zero. None for
    UTF-8.
    """
    for mark, name in ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if first.startswith(mark) and not first.startswith(codecs.BOM_UTF32_LE):
            return name
    sample = first[:512]
    half = len(sample) // 2
    if half >= 16:
        if sample[1::2].count(0) > 0.9 * half and sample[::2].count(0) == 0:
            return "utf-16-le"
        if sample[::2].count(0) > 0.9 * half and sample[1::2].count(0) == 0:
            return "utf-16-be"
    return None


def plain_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Convert chunks to UTF-8 without byte order marks and colours, and unwrap JSON."""
    chunks = _without_encoding(chunks)
    first = next(chunks, b"")
    chunks = _joined(first, chunks)
    key = _text_key(first)
    for chunk in _without_colours(chunks if key is None else _unwrapped(chunks, key)):
        yield _RECORD.sub(rb"\1\r", chunk) if b"]<std" in chunk else chunk


def text_chunks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Convert chunks to UTF-8 without byte order marks and colours; JSON is unchanged."""
    return _without_colours(_without_encoding(chunks))


def plain_bytes(text: bytes) -> bytes:
    """Convert a text, or its start, to UTF-8 without byte order marks and colours; JSON is unchanged."""
    return b"".join(text_chunks(iter([text])))


def _joined(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first.removeprefix(codecs.BOM_UTF8)
    yield from rest


def _without_encoding(chunks: Iterator[bytes]) -> Iterator[bytes]:
    first = next(chunks, b"")
    encoding = encoding_of(first)
    chunks = _joined(first, chunks)
    return _without_holes(chunks) if encoding is None else _joined_text(_decoded(chunks, encoding))


def has_holes(first: bytes) -> bool:
    """Return True if there are long runs of zero bytes, which unwritten extents and full disks leave."""
    return _HOLE.search(first) is not None


def num_holes(text: bytes) -> int:
    """Number of runs of zero bytes."""
    return len(_ZEROS.findall(text))


def without_holes(text: bytes) -> bytes:
    """Replace each run of zero bytes with one space, which keeps line numbers."""
    return _ZEROS.sub(b" ", text) if b"\0" in text else text


def _without_holes(chunks: Iterator[bytes]) -> Iterator[bytes]:
    return (without_holes(chunk) for chunk in chunks)


def _joined_text(chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield from _joined(next(chunks, b""), chunks)  # without the byte order mark


def _decoded(chunks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _without_colours(chunks: Iterator[bytes]) -> Iterator[bytes]:
    held = b""
    for chunk in chunks:
        if not held and b"\x1b" not in chunk and (b"^" not in chunk or b"^[[" not in chunk):
            yield chunk
            continue
        text = held + chunk
        cut = text.rfind(b"\x1b", max(0, len(text) - _LONGEST))
        is_cut = cut >= 0 and _COLOURS.match(text, cut) is None and b"\n" not in text[cut:]
        held, text = (text[cut:], text[:cut]) if is_cut else (b"", text)
        text = _COLOURS.sub(b"", text)
        yield _SHOWN_COLOURS.sub(b"", text) if b"^[[" in text else text
    if held:
        yield held


def _text_key(first: bytes) -> str | None:
    """The field with the text, if nearly all of the first lines are objects that have it."""
    if b"{" not in first[: MAX_BEFORE + 1]:
        return None
    lines = [line for line in first[:MAX_LINE_BYTES].split(b"\n")[: SAMPLE_LINES + 1] if line.strip()]
    lines = lines[:-1] if len(lines) > 1 and not first[:MAX_LINE_BYTES].endswith(b"\n") else lines
    objects = [found for line in lines[:SAMPLE_LINES] if (found := _object(line)[1]) is not None]
    if any("loss" in str(name).lower() for one in objects for name in one):
        return None  # the objects are metrics of training; a string among their values is not the text of a log line
    for key in _TEXT_KEYS:
        if objects and sum(isinstance(one.get(key), str) for one in objects) >= 0.9 * len(lines[:SAMPLE_LINES]):
            return key
    return None


def _unwrapped(chunks: Iterator[bytes], key: str) -> Iterator[bytes]:
    """Yield each object's text, preceded by its time. Other lines are unchanged."""
    kept = b""
    is_continued = False
    for chunk in chunks:
        lines = (kept + chunk).split(b"\n")
        kept = lines.pop()
        if len(kept) > MAX_LINE_BYTES:
            lines.append(kept)
            kept = b""
        texts = []
        for line in lines:
            text, ends = _text_of(line, key, is_continued)
            texts.append(text)
            is_continued = not ends
        yield b"".join(texts)
    if kept:
        yield _text_of(kept, key, is_continued)[0]


def _text_of(line: bytes, key: str, is_continued: bool) -> tuple[bytes, bool]:
    """The text of a line, and whether it ends there: Docker splits long lines into objects without a line end."""
    before, found = _object(line)
    text = found.get(key) if found else None
    if found is None or not isinstance(text, str):
        return line + b"\n", True
    ends = key != "log" or text.endswith("\n")
    time = next((found[name] for name in _TIME_KEYS if isinstance(found.get(name), str)), "")
    time = "" if is_continued or not time[:4].isdigit() else f"{time[:40]} "
    begin = "" if is_continued else f"{before.decode('utf-8', 'replace')}{time}"
    body = text.removesuffix("\n").replace("\n", f"\n{begin}")
    return f"{begin}{body}{chr(10) * ends}".encode("utf-8", "replace"), ends


def _object(line: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """Split a line into the text before its JSON object, and the object; None without one."""
    at = line.find(b"{", 0, MAX_BEFORE + 1)
    if at < 0:
        return b"", None
    try:
        found = json.loads(line[at:])
    except (ValueError, RecursionError):
        return b"", None
    return line[:at].lstrip(), found if isinstance(found, dict) else None


def windows(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield (bytes, end): lines that begin before `end` belong to this window; later bytes only complete their blocks.

    If a line fills a window (`is_endless`), it is not text, and would be cut into thousands of lines. So the rest of it
    is skipped, and yielded as (b"", number of bytes).
    """
    kept = b""
    is_in_line = False
    for chunk in chunks:
        if is_in_line:
            ends = [at for at in (chunk.find(b"\n"), chunk.find(b"\r")) if at >= 0]
            yield b"", min(ends, default=len(chunk))
            if not ends:
                continue
            is_in_line, chunk = False, chunk[min(ends) :]
        kept += chunk
        if len(kept) < CHUNK_BYTES + BLOCK_BYTES:
            continue
        if is_endless(kept):
            is_in_line = True
            yield kept, len(kept)
            kept = b""
            continue
        end = kept.rfind(b"\n", 0, len(kept) - BLOCK_BYTES) + 1 or len(kept) - BLOCK_BYTES
        yield kept, end
        kept = kept[end:]
    if kept:
        yield kept, len(kept)


def is_endless(window: bytes) -> bool:
    """Return True if a window holds a single line without its end."""
    return len(window) >= CHUNK_BYTES and b"\n" not in window and b"\r" not in window
