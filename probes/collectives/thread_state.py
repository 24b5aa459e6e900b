"""Python's state of a thread that Python did not start, kept from one call to the next.

    future.add_done_callback(done)       # gloo's thread calls it
    def done(future): keep_thread_state(); ...

A thread of C++ that calls Python gets a state at the call and loses it when the call returns. With it goes the memory
of its frames: mapped and unmapped each time, and the unmapping interrupts the other cores on which the process runs. Of
a DDP step of 4 ms that was a tenth. A thread that keeps its state pays once.

What is kept of a thread that ends (some 20 kB) is freed at the end of the process: two threads for each gloo group.
"""

from __future__ import annotations

import ctypes
import threading

__all__ = ["keep_thread_state"]

_this_thread = threading.local()  # goes with the state: a new thread with an old thread's number has none of it


def keep_thread_state() -> None:
    """Keep the state of the calling thread until the process ends."""
    if not hasattr(_this_thread, "is_kept"):
        _this_thread.is_kept = True
        ctypes.pythonapi.PyGILState_Ensure()  # counts a call that does not return
