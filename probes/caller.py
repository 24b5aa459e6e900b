"""Who made a call: the nearest frame outside torch, the standard library and these probes.

    callers = CallerNames(recorder.name)
    callers(1)        # of our caller: number of the name "train.py:48 training_step", 0 if there is none

Every collective asks, and a walk up the stack makes an object of every frame that it meets, some twenty inside FSDP: it
cost more than the rest of a record. So the answer for a place in torch's code is remembered with how far up it was, and
if that very instruction is there again, it is the answer. The walk is bounded.
Where autograd runs a backward on a thread of its own there are no Python frames, hence no caller.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NamedTuple

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


MAX_GUESSES = 4  # a place in torch's code serves the root module, its blocks and the backward pass
_getframe = sys._getframe


class _Guess(NamedTuple):
    """Where the caller of a place was found before: so many frames up, at this instruction."""

    distance: int
    code: CodeType
    instruction: int
    number: int


class CallerNames:
    """Turns frames into interned names of the form `file:line function`."""

    def __init__(self, name: Callable[[str], int]) -> None:
        self._name = name
        self._guesses: dict[tuple[CodeType, int, CodeType | None], list[_Guess]] = {}
        self._internal: dict[CodeType, bool] = {}
        self._known: dict[tuple[CodeType, int], int] = {}
        self._folder = os.getcwd() + os.sep

    def __call__(self, level: int) -> int:
        """The number of the name of the first frame outwards that is somebody's own code.

        `level` says where to begin, as for `sys._getframe` in the function that calls this.
        """
        level += 1
        first = _getframe(level)
        try:
            second = _getframe(level + 1).f_code
        except ValueError:
            second = None
        # Two frames tell torch's own calls from somebody's call of the same function.
        place = (first.f_code, first.f_lasti, second)
        guesses = self._guesses.get(place)
        if guesses is None:
            guesses = self._guess_from(place)
        for guess in guesses:
            try:
                frame = _getframe(level + guess.distance)
            except ValueError:
                continue
            if frame.f_code is guess.code and frame.f_lasti == guess.instruction:
                return guess.number
        return self._walk(first, guesses)

    def _guess_from(self, place: tuple[CodeType, int, CodeType | None]) -> list[_Guess]:
        if len(self._guesses) >= MAX_REMEMBERED:
            self._guesses.clear()
        guesses: list[_Guess] = []
        self._guesses[place] = guesses
        return guesses

    def _walk(self, frame: FrameType | None, guesses: list[_Guess]) -> int:
        internal = self._internal
        for distance in range(MAX_FRAMES):
            if frame is None:
                return 0
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
                guesses.insert(0, _Guess(distance, code, frame.f_lasti, number))
                del guesses[MAX_GUESSES:]
                return number
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
