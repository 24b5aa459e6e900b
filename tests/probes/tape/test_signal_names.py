"""Names of signals."""

from __future__ import annotations

import signal

from probes.tape.signal_names import signal_name


def test_each_end_by_a_signal_has_a_name() -> None:
    assert signal_name(-signal.SIGKILL) == "SIGKILL"
    assert signal_name(-(signal.SIGRTMIN + 9)) == "SIGRTMIN+9"
    assert [signal_name(-number) for number in range(1, signal.SIGRTMAX + 1) if not signal_name(-number)] == []
    assert signal_name(-32) == "signal 32"  # the C library's own


def test_what_is_no_signal_has_no_name() -> None:
    assert [signal_name(code) for code in (0, 3, -(signal.SIGRTMAX + 1), -127)] == ["", "", "", ""]
