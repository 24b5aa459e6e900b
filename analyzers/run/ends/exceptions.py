"""Parse a Python traceback: the first exception, and the user's line that raised it.

    links = read_traceback(text)         # one link per exception of a chain, the original exception first
    frame = own_frame(links[0])          # the innermost frame outside of installed packages
    frame.text                           # "data/loader.py:41 in __getitem__"

The text was written by the run and is not trusted: a text without a traceback gives no links, and lengths are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Frame", "Link", "frame_texts", "own_frame", "own_frame_text", "read_traceback"]

MAX_CHARACTERS = 64 << 10
"""Characters read at the end of a traceback; `probes` writes 20,000."""
MAX_FRAMES = 12
"""Maximum number of frames of a traceback that a finding has."""
_NEXT = re.compile(
    r"^(The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)$",
    re.MULTILINE,
)
_FRAME = re.compile(r'^ {0,12}File "([^"]{1,500})", line (\d{1,9})(?:, in| in)? ?(.{0,200})$')
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]{0,200}\.)?([A-Za-z_]\w{0,100})(?::\s?(.{0,4000}))?$")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_PYTHONS = re.compile(r"/lib(?:64)?/python3\.\d+/|^<(?!dynamic-code>|stdin>)")
"""Files of Python's library, and names such as `<string>` that are not files. `<dynamic-code>` (cloudpickle, as in
submitit) and `<stdin>` (a shell's pipe) are excepted, because they are the user's code."""
_OURS = re.compile(
    r"(?:^|/)(?:rankscope/)?probes/(?:attach|collectives|device|guard|profiling|tape)/"
    r"|(?:^|/)(?:rankscope/)?probes/(?:gradients|tape_recorder|step_clock|compilation)\.py$"
    r"|(?:^|/)rankscope/(?:attached_script\.py$|worker\.py$|frameworks/)"
)
"""Rankscope's code that calls the user's code, wherever it is installed."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a traceback."""

    path: str
    line: int
    function: str
    package: str = ""
    """Folder of the program's own package, which is the user's code wherever it is installed."""

    @property
    def is_library(self) -> bool:
        """True for code of Python, of an installed package other than the program's, or of Rankscope's probes."""
        if _OURS.search(self.path) is not None:
            return True
        is_programs = bool(self.package) and self.path.startswith(f"{self.package.rstrip('/')}/")
        return not is_programs and (_INSTALLED.search(self.path) is not None or self.is_pythons)

    @property
    def is_pythons(self) -> bool:
        """True for code of Python's standard library."""
        return _INSTALLED.search(self.path) is None and _PYTHONS.search(self.path) is not None

    @property
    def text(self) -> str:
        """The frame in one line, its path cut to the last two parts."""
        where = f"{'/'.join(self.path.split('/')[-2:])}:{self.line}"
        return f"{where} in {self.function}" if self.function else where


@dataclass(frozen=True, slots=True)
class Link:
    """One exception of a chain. `frames` are outermost first, `error_type` has no module before it.

    `is_caused`: it was raised `from` the previous one; otherwise it was raised while the previous one was handled, or
    later.
    """

    error_type: str
    message: str
    frames: tuple[Frame, ...] = ()
    is_caused: bool = False


def read_traceback(text: str, package: str = "") -> list[Link]:
    """The exceptions of a traceback, the original one first; empty if it holds no frame.

    `package`: folder of the program's own package.
    """
    first, *others = _NEXT.split(text[-MAX_CHARACTERS:])
    joined = zip(others[::2], others[1::2], strict=False)
    parts = [(first, False), *((part, join.startswith("The above")) for join, part in joined)]
    return [link for part, is_caused in parts if (link := _link(part, is_caused, package)).frames]


def own_frame(link: Link) -> Frame | None:
    """The innermost frame of the user's code. Without one, it is the innermost frame of an installed package, or else
    of Python."""
    of_others = [frame for frame in link.frames if _OURS.search(frame.path) is None] or list(link.frames)
    return min(reversed(of_others), key=lambda frame: (frame.is_library, frame.is_pythons), default=None)


def is_ours(path: str) -> bool:
    """Return True for a file of Rankscope that calls the user's code or wraps a torch function."""
    return _OURS.search(path) is not None


def own_frame_text(traceback: str) -> str:
    """The user's line in the last exception that has one: `data/loader.py:41 in __getitem__`; empty without frames."""
    links = read_traceback(traceback)
    frames = [frame for link in reversed(links) if (frame := own_frame(link)) is not None]
    chosen = next((frame for frame in frames if not frame.is_library), frames[0] if frames else None)
    return chosen.text if chosen is not None else ""


def frame_texts(link: Link) -> list[str]:
    """The last frames, innermost first, as text."""
    kept = [frame for frame in link.frames if _OURS.search(frame.path) is None]
    return [frame.text for frame in reversed(kept[-MAX_FRAMES:])]


def _link(text: str, is_caused: bool, package: str) -> Link:
    lines = text.splitlines()
    frames = tuple(_frames(lines, package))
    # The error line follows the frames and is not indented; an error from a loader's worker contains frames in its
    # message.
    errors = [match for line in lines if not line.startswith("Traceback ") and (match := _ERROR.match(line))]
    error_type, message = (errors[0][1], errors[0][2] or "") if errors else ("", "")
    return Link(error_type, message, frames, is_caused)


def _frames(lines: list[str], package: str) -> Iterator[Frame]:
    for line in lines:
        if match := _FRAME.match(line):
            yield Frame(match[1], int(match[2]), match[3].strip(), package)
