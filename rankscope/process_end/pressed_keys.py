"""Read keys in a command that redraws the terminal: `q` quits, as in `top` and `less`.

    with pressed_keys() as asks_to_leave:
        while not asks_to_leave(1.0):        # waits up to a second
            ...

Ctrl-C remains a signal. If standard input is not a terminal, it is not read.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["pressed_keys"]


@contextlib.contextmanager
def pressed_keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits the given seconds, and returns True as soon as `q` is pressed.

    Keys are neither echoed nor passed to the shell. The terminal's mode is restored afterwards.
    """
    import termios
    import tty

    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (OSError, ValueError, termios.error):  # standard input is closed, is a pipe, or has no descriptor
        yield _wait
        return
    if _is_background(keyboard):  # a background process is stopped if it changes the terminal
        yield _wait
        return
    tty.setcbreak(keyboard)
    try:
        yield lambda seconds: _is_leaving(keyboard, seconds)
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_background(keyboard: int) -> bool:
    try:
        return os.tcgetpgrp(keyboard) != os.getpgrp()
    except OSError:  # the terminal belongs to another session
        return False


def _is_leaving(keyboard: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        if select.select([keyboard], [], [], left_s)[0]:
            try:
                keys = os.read(keyboard, 64)
            except OSError:
                keys = b""
            if not keys or b"q" in keys.lower():  # end of file: the terminal was closed
                return True
    return False
