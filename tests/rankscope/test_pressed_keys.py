"""`q` ends a command that redraws the terminal, and the terminal is afterwards as it was."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator

import pytest

from rankscope.process_end.pressed_keys import pressed_keys


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The writing end of a terminal that is standard input."""
    keyboard, terminal = os.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield keyboard
    os.close(keyboard)


@pytest.mark.parametrize(("keys", "leaves"), [(b"q", True), (b"Q", True), (b"xq", True), (b"x\n", False), (b"", False)])
def test_q_leaves_and_other_keys_do_not(keyboard: int, keys: bytes, leaves: bool) -> None:
    before = termios.tcgetattr(sys.stdin)
    with pressed_keys() as asks_to_leave:
        during = termios.tcgetattr(sys.stdin)
        assert not during[3] & (termios.ECHO | termios.ICANON), "a key is read at once and not shown"
        os.write(keyboard, keys)
        assert asks_to_leave(30.0 if leaves else 0.05) is leaves
    assert termios.tcgetattr(sys.stdin) == before


def test_the_terminal_is_restored_after_an_error(keyboard: int) -> None:
    before = termios.tcgetattr(sys.stdin)
    with pytest.raises(KeyboardInterrupt), pressed_keys():
        raise KeyboardInterrupt
    assert termios.tcgetattr(sys.stdin) == before


def test_without_a_terminal_only_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pressed_keys() as asks_to_leave:
            assert not asks_to_leave(0.01)
