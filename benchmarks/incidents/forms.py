"""Forms in which the same log reaches a reader: behind a prefix, coloured, cut, in another encoding."""

from __future__ import annotations

import json
import random
import zlib

__all__ = ["FORMS", "form"]

FORMS = ("as it is", "prefixed", "coloured", "cut or UTF-16")
_PREFIXES = (
    "2026-03-01T10:00:{s:02d}.{n:09d}Z stderr F ",
    "[pod/train-job-worker-0/pytorch] ",
    "Mar 01 10:00:{s:02d} gpu-node-7 torchrun[2211]: ",
    "train-worker-0 trainer ",
    "2026-03-01 10:00:{s:02d},{n:03.0f} - launcher - INFO - ",
    "0: ",
    "<14>1 2026-03-01T10:00:{s:02d}Z node7 job 71 - - ",
    "algo-1-x8k2p  | ",
    "docker",
)


def form(text: str, name: str, key: str) -> bytes:
    """Return a log in a form, as bytes; `key` selects the prefix, always the same one for a case."""
    number = zlib.crc32(key.encode())
    if name == "prefixed":
        return _prefixed(text, _PREFIXES[number % len(_PREFIXES)]).encode()
    if name == "coloured":
        return _coloured(text, number).encode()
    if name == "cut or UTF-16":
        lines = text.splitlines(keepends=True)
        return "".join(lines[len(lines) // 3 :]).encode() if number % 2 and len(lines) > 60 else text.encode("utf-16")
    return text.encode()


def _prefixed(text: str, prefix: str) -> str:
    lines = text.replace("\r", "\n").lstrip("\n").split("\n")
    if prefix == "docker":
        return "".join(
            json.dumps({"log": line + "\n", "stream": "stderr", "time": f"2026-03-01T10:00:{i % 60:02d}.1Z"}) + "\n"
            for i, line in enumerate(lines)
        )
    return "\n".join(prefix.format(s=i % 60, n=i) + line for i, line in enumerate(lines))


def _coloured(text: str, number: int) -> str:
    rng = random.Random(number)
    words = text.split(" ")
    for i in range(0, len(words), 7):
        if words[i].strip() and "\n" not in words[i] and "\r" not in words[i]:
            words[i] = f"\x1b[{rng.choice((1, 31, 32, 33, 36))}m{words[i]}\x1b[0m"
    return " ".join(words)
