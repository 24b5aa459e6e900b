"""Tell from the lines of a loop whether an error came in the iteration after the newest update.

    update = UpdateLine()
    update.made(sys._getframe())              # in the hook of the optimizer's step
    ...
    update.is_followed_by(frames_of_error(error))

After an update, nothing is recorded until the next fetch or forward pass. This gap contains the end of one iteration
and the start of the next, and a loop that makes its batches by itself does not show where one ends. The line of the
error shows it: in the function in which the stacks of the error and of the update diverge, a line above the update
belongs to the next iteration, and a line below it belongs to the same iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType, FrameType

__all__ = ["Frames", "UpdateLine", "frames_of_error", "frames_of_stack"]

Frames = Sequence[tuple[FrameType, int]]
"""Frames with their lines, outermost first."""


def frames_of_stack(frame: FrameType | None) -> Frames:
    """`frame` and the frames of its callers, with their current lines."""
    found = []
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def frames_of_error(error: BaseException) -> Frames:
    """Frames in the traceback of an error. If errors are chained (`__cause__`, `__context__`), of the first one."""
    seen: set[int] = set()
    while (earlier := error.__cause__ or error.__context__) is not None and id(error) not in seen:
        seen.add(id(error))
        error = earlier
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


class UpdateLine:
    """Stack of the loop's newest update."""

    def __init__(self) -> None:
        self._lines: Sequence[tuple[CodeType, int]] = ()  # no frames, because they would keep variables alive

    def made(self, frame: FrameType | None) -> None:
        """Note an update that was made in this frame."""
        self._lines = _codes(frames_of_stack(frame))

    def is_followed_by(self, frames: Frames) -> bool:
        """Return True if an error with these frames, raised after the update, belongs to the next iteration."""
        lines = _codes(frames)
        known = [code for code, _ in self._lines]
        first = next((i for i, (code, _) in enumerate(lines) if code in known), len(lines))
        if first == len(lines):
            return False
        update_lines = self._lines[known.index(lines[first][0]) :]
        for (code, line), (other, updated_at) in zip(lines[first:], update_lines, strict=False):
            if code is not other:
                return False
            if line != updated_at:
                return line < updated_at
        return False


def _codes(frames: Frames) -> Sequence[tuple[CodeType, int]]:
    return [(frame.f_code, line) for frame, line in frames]
