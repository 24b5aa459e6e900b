"""Tell from the lines of a loop whether an error came in the iteration after the newest update.

    update = UpdateLine()
    update.made(sys._getframe())              # in the hook of the optimizer's step
    ...
    update.is_followed_by(lines_of_error(error))

Between an update and the next thing recorded lie the end of one iteration and the start of the next: a loop that makes
its batches by itself shows nothing in between. In the function in which the stacks of the error and of the update
diverge, a line above the update's belongs to the next iteration, a line below it to the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FrameType

__all__ = ["Lines", "UpdateLine", "lines_of_error", "lines_of_stack"]

Lines = Sequence[tuple[CodeType, int]]
"""Function and line of each frame, outermost first."""


def lines_of_stack(frame: FrameType | None) -> Lines:
    """Current lines of `frame` and of the functions that called it."""
    found = []
    while frame is not None:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def lines_of_error(error: BaseException) -> Lines:
    """Lines of the traceback of an error; of the first one, if it was raised from or while another was handled."""
    seen: set[int] = set()
    while (earlier := error.__cause__ or error.__context__) is not None and id(error) not in seen:
        seen.add(id(error))
        error = earlier
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return found


class UpdateLine:
    """Stack of the loop's newest update."""

    def __init__(self) -> None:
        self._lines: Lines = ()

    def made(self, frame: FrameType | None) -> None:
        """An update was made in this frame."""
        self._lines = lines_of_stack(frame)

    def is_followed_by(self, lines: Lines) -> bool:
        """Return True if an error with these lines, raised after the update, is of the iteration after it."""
        known = [code for code, _ in self._lines]
        begin = next((i for i, (code, _) in enumerate(lines) if code in known), len(lines))
        if begin == len(lines):
            return False
        of_update = self._lines[known.index(lines[begin][0]) :]
        for (code, line), (other, updated_at) in zip(lines[begin:], of_update, strict=False):
            if code is not other:
                return False
            if line != updated_at:
                return line < updated_at
        return False
