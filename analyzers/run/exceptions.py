"""Parse a Python traceback: the first exception, and the user's line that raised it.

    links = read_traceback(text)         # one for each exception of a chain, the original one first
    frame = own_frame(links[0])          # the innermost one outside of installed packages
    frame.text                           # "data/loader.py:41 in __getitem__"

The text was written by the run and is not trusted: text that is no traceback gives no links, and lengths are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import probes

__all__ = ["Frame", "Link", "frame_texts", "own_frame", "read_traceback"]

MAX_CHARACTERS = 64 << 10
"""Of a traceback's end that are read; `probes` writes 20,000."""
MAX_FRAMES = 12
"""Frames of a traceback that a finding carries."""
_NEXT = re.compile(
    r"^(The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)$",
    re.MULTILINE,
)
_FRAME = re.compile(r'^ {1,4}File "([^"]{1,500})", line (\d{1,9})(?:, in| in)? ?(.{0,200})$')
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]{0,200}\.)?([A-Za-z_]\w{0,100})(?::\s?(.{0,4000}))?$")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<")
_OURS = str(Path(probes.__file__).parent) + "/"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback."""

    path: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """True for code of Python, of an installed package, or of our probes, which wrap both."""
        return _LIBRARY.search(self.path) is not None or self.path.startswith(_OURS)

    @property
    def text(self) -> str:
        """The frame in one line, its path cut to the last two parts."""
        where = f"{'/'.join(self.path.split('/')[-2:])}:{self.line}"
        return f"{where} in {self.function}" if self.function else where


@dataclass(frozen=True, slots=True)
class Link:
    """One exception of a chain. `frames` are outermost first, `error_type` has no module before it.

    `is_caused`: it was raised from the one before it; else it came up while that one was handled, or after it.
    """

    error_type: str
    message: str
    frames: tuple[Frame, ...] = ()
    is_caused: bool = False


def read_traceback(text: str) -> list[Link]:
    """The exceptions of a traceback, the original one first; empty if it holds no frame."""
    first, *others = _NEXT.split(text[-MAX_CHARACTERS:])
    joined = zip(others[::2], others[1::2], strict=False)
    parts = [(first, False), *((part, join.startswith("The above")) for join, part in joined)]
    return [link for part, is_caused in parts if (link := _link(part, is_caused)).frames]


def own_frame(link: Link) -> Frame | None:
    """The innermost frame of the user's own code; where there is none, the innermost of all."""
    return next((f for f in reversed(link.frames) if not f.is_library), link.frames[-1] if link.frames else None)


def frame_texts(link: Link) -> list[str]:
    """The last frames, innermost first, as text."""
    return [frame.text for frame in reversed(link.frames[-MAX_FRAMES:])]


def _link(text: str, is_caused: bool) -> Link:
    lines = text.splitlines()
    frames = tuple(_frames(lines))
    # The error stands at the margin after the frames; the message of a loader's worker holds frames itself.
    errors = [match for line in lines if not line.startswith("Traceback ") and (match := _ERROR.match(line))]
    error_type, message = (errors[0][1], errors[0][2] or "") if errors else ("", "")
    return Link(error_type, message, frames, is_caused)


def _frames(lines: list[str]) -> Iterator[Frame]:
    for line in lines:
        if match := _FRAME.match(line):
            yield Frame(match[1], int(match[2]), match[3].strip())
