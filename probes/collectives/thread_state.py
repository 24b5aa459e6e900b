"""Keep the Python state of a C++ thread between its calls into Python.

    future.add_done_callback(done)       # gloo's thread calls it
    def done(future): keep_thread_state(); ...

A thread of C++ that calls Python gets a state at the call and loses it when the call returns. The memory of its frames
is mapped and unmapped each time, and unmapping interrupts the other cores of the process. That was a tenth of a DDP
step of 4 ms. A thread that keeps its state pays once.

The state of a thread that has ended (about 20 kB) is freed only at the end of the process; each gloo group has two
threads.
"""

from __future__ import annotations

import ctypes
import threading

__all__ = ["keep_thread_state"]

_this_thread = threading.local()  # freed with the thread's state, so a new thread with a reused id starts without it


def keep_thread_state() -> None:
    """Keep the state of the calling thread until the process ends."""
    if not hasattr(_this_thread, "is_kept"):
        _this_thread.is_kept = True
        ctypes.pythonapi.PyGILState_Ensure()  # without a release, so the state's counter stays above 0
