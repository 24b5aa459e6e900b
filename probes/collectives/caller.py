"""Call site of a collective: the nearest frame outside torch, the standard library and these probes.

    callers = CallerNames(recorder.name)
    caller = callers.find(1)       # begins at our caller; `number` stands for "train.py:48 training_step"

Walking up the stack creates an object for every frame, some twenty inside FSDP, and costs more than the rest of a
record. So the result says how many frames up the call site is, and at which instruction. For the next record,
`probes.collectives.call_records` only checks whether that frame is at the same instruction. The walk is bounded. If
autograd runs backward on a separate thread, there are no Python frames and so no caller.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NamedTuple

import torch

__all__ = ["Caller", "CallerNames"]

MAX_FRAMES = 80  # torch has three frames per level of nested modules
MAX_REMEMBERED = 4096  # a program that generates code must not fill the memory

_PROBES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
# typing_extensions wraps what torch calls deprecated.
_INTERNAL = (_TORCH + os.sep, _PROBES, "<", os.path.join(os.path.dirname(_TORCH), "typing_extensions.py"))
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_SITE_PACKAGES = tuple(sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib"))

_getframe = sys._getframe


class Caller(NamedTuple):
    """A known call site: `distance` frames up the stack, at this instruction. `number` is the number of its name."""

    distance: int
    code: CodeType
    instruction: int
    number: int


class CallerNames:
    """Turns frames into interned names of the form `file:line function`."""

    def __init__(self, name: Callable[[str], int]) -> None:
        self._name = name
        self._internal: dict[CodeType, bool] = {}
        self._known: dict[tuple[CodeType, int], int] = {}
        self._folder = os.getcwd() + os.sep

    def find(self, level: int) -> Caller | None:
        """Find the innermost frame of user code; None if there is none. `level` is where the search begins, and
        `distance` where the frame was found, both counted like the argument of `sys._getframe` in the calling function.
        """
        try:
            frame: FrameType | None = _getframe(level + 1)
        except ValueError:
            return None
        internal = self._internal
        for distance in range(level, level + MAX_FRAMES):
            if frame is None:
                return None
            code = frame.f_code
            skip = internal.get(code)
            if skip is None:
                skip = self._remember(code)
            if not skip:
                # The instruction stands for the line: working out a line number costs more than the look-up.
                place = (code, frame.f_lasti)
                number = self._known.get(place)
                if number is None:
                    number = self._describe(frame, place)
                return Caller(distance, code, frame.f_lasti, number)
            frame = frame.f_back
        return None

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
