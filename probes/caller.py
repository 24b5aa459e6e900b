"""Who made a call: the nearest frame outside torch, the standard library and these probes.

    callers = CallerNames(recorder.name)
    callers(sys._getframe(1))        # number of the name "train.py:48 training_step", 0 if there is none

Every collective asks, so the answer for a place in the code is remembered, and the walk up the stack is bounded.
Where autograd runs a backward on a thread of its own there are no Python frames, hence no caller.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType

import torch

__all__ = ["CallerNames"]

MAX_FRAMES = 80  # a module in a module in a module costs three frames of torch a level
MAX_REMEMBERED = 4096  # code that is made at run time must not fill the memory

_PROBES = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
# typing_extensions wraps what torch calls deprecated.
_INTERNAL = (_TORCH + os.sep, _PROBES, "<", os.path.join(os.path.dirname(_TORCH), "typing_extensions.py"))
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_SITE_PACKAGES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib"))


class CallerNames:
    """Turns frames into interned names of the form `file:line function`."""

    def __init__(self, name: Callable[[str], int]) -> None:
        self._name = name
        self._internal: dict[CodeType, bool] = {}
        self._known: dict[tuple[CodeType, int], int] = {}
        self._folder = os.getcwd() + os.sep

    def __call__(self, frame: FrameType | None) -> int:
        """The number of the name of the first frame, from `frame` outwards, that is somebody's own code."""
        internal = self._internal
        for _ in range(MAX_FRAMES):
            if frame is None:
                return 0
            code = frame.f_code
            skip = internal.get(code)
            if skip is None:
                skip = self._remember(code)
            if not skip:
                # The instruction stands for the line: working out a line number costs more than the look-up.
                place = (code, frame.f_lasti)
                known = self._known.get(place)
                return self._describe(frame, place) if known is None else known
            frame = frame.f_back
        return 0

    def _remember(self, code: CodeType) -> bool:
        if len(self._internal) >= MAX_REMEMBERED:
            self._internal.clear()
        path = code.co_filename
        stdlib = path.startswith(_STDLIB) and not path.startswith(_SITE_PACKAGES)
        self._internal[code] = skip = stdlib or path.startswith(_INTERNAL)
        return skip

    def _describe(self, frame: FrameType, place: tuple[CodeType, int]) -> int:
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        path = place[0].co_filename.removeprefix(self._folder)
        number = self._name(f"{path}:{frame.f_lineno} {place[0].co_qualname}")
        self._known[place] = number
        return number
