"""Write numbers logged by the user under custom names to the tape `scalars`.

    scalars = UserScalars(recorder)
    scalars.write(12, accuracy=0.5)

A name is kept in the rank's names for good, so their number is limited: a loop that makes up a name in each step loses
the later ones, and is told so once.
"""

from __future__ import annotations

import logging

from .fail_open import failing_open
from .tape.writer import COMPLETE
from .tape_recorder import TapeRecorder

__all__ = ["MAX_NAMES", "UserScalars"]

logger = logging.getLogger("rankscope.probes")
MAX_NAMES = 256
MAX_NAME_CHARS = 200


class UserScalars:
    """The user's scalars of one recorder."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self._names: dict[str, int] = {}
        self._is_full = False

    def write(self, step: int, /, **values: float) -> None:
        """Append one record each."""
        with failing_open("scalars"):
            for name, value in values.items():
                number = self._number(name)
                if number is not None:
                    self._recorder.tape("scalars").append(COMPLETE, step, number, float(value))

    def _number(self, name: str) -> int | None:
        known = self._names.get(name)
        if known is not None:
            return known
        if len(self._names) >= MAX_NAMES:
            if not self._is_full:
                self._is_full = True
                logger.warning("rankscope.log: more than %d names; %s and later ones are not kept", MAX_NAMES, name)
            return None
        self._names[name] = number = self._recorder.name(name[:MAX_NAME_CHARS])
        return number
