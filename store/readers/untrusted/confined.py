"""Run a reader of untrusted files in a separate process, whose memory and time the kernel limits.

    trace = confined(read_nsys, path)          # like read_nsys(path), or SourceError("needed more than ...")

A small JSON text or pickle cannot take much memory and is read in this process. One child is kept for the next file.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from probes.tape.redaction.printable import visible
from store.limited import limits
from store.limited.process import LimitedProcess
from store.readers.untrusted.external_files import SourceError, first_bytes

__all__ = ["confined"]

MEMORY_BYTES = 320 << 20
MEMORY_RATIO = 4
"""Additional bytes of memory per byte of the file."""
LIMIT_S = 50.0
BYTES_PER_S = 16 << 20
"""The time limit grows by a second per this many bytes. Source: the slowest text reader reads this much per second."""
SHORT_BYTES = 1 << 20
"""Up to this size, files are read in this process: JSON text or a plain pickle grows at most about 60-fold in
memory.
"""
MAX_ANSWER_BYTES = 1 << 30
_BLANK = b"\xef\xbb\xbf \t\r\n"
T = TypeVar("T")


def confined(read: Callable[..., T], path: Path, *arguments: Any, **options: Any) -> T:
    """Return `read(path, *arguments, **options)`, where `read` is a function of a Rankscope module. Raises
    SourceError.
    """
    first, num_bytes = first_bytes(path, 64)
    if num_bytes <= SHORT_BYTES and first.lstrip(_BLANK)[:1] in (b"{", b"[", b"\x80"):
        return read(path, *arguments, **options)
    memory_bytes, limit_s = MEMORY_BYTES + MEMORY_RATIO * num_bytes, LIMIT_S + num_bytes / BYTES_PER_S
    question = pickle.dumps((read, (path, *arguments), options, memory_bytes, limit_s))
    with _lock:
        kind, value = _ask(question, memory_bytes, limit_s)
    if kind == "error":
        raise SourceError(value)
    found: T = value
    return found


_lock = threading.Lock()
_idle: list[tuple[int, LimitedProcess]] = []
"""The idle child, and the pid of its parent: a forked process must not use it."""


def _ask(question: bytes, memory_bytes: int, limit_s: float) -> tuple[str, Any]:
    while _idle:
        owner, child = _idle.pop()
        if owner == os.getpid() and child.process.poll() is None:
            break
        if owner == os.getpid():
            child.kill()
    else:
        child = LimitedProcess(__spec__.name, max_answer_bytes=MAX_ANSWER_BYTES)
    began_s = time.monotonic()
    try:
        answer: tuple[str, Any] = pickle.loads(child.ask(question, limit_s))  # noqa: S301 - of our process
    except BaseException as error:
        child.kill()
        if not isinstance(error, (EOFError, TimeoutError, OSError)):
            raise
        if isinstance(error, TimeoutError) or time.monotonic() - began_s >= limit_s:
            return "error", f"took longer than {limit_s:.0f} s to read and was given up"
        return "error", f"needed more than {memory_bytes >> 20:,} MiB of memory and was given up"
    _idle.append((os.getpid(), child))
    return answer


@atexit.register
def _close() -> None:
    while _idle:
        owner, child = _idle.pop()
        if owner == os.getpid():
            child.kill()


def _answer(question: bytes) -> bytes:
    read, arguments, options, memory_bytes, limit_s = pickle.loads(question)  # noqa: S301 - of our parent
    limits.limit_memory(memory_bytes)
    too_large = pickle.dumps(("error", f"needed more than {memory_bytes >> 20:,} MiB of memory and was given up"))
    try:
        with limits.time_limit(limit_s):
            found = pickle.dumps(("value", read(*arguments, **options)))
        return found if len(found) <= MAX_ANSWER_BYTES else too_large
    except SourceError as error:
        return pickle.dumps(("error", str(error)))
    except MemoryError:
        return too_large
    except OSError as error:
        return pickle.dumps(("error", f"cannot be read: {error.strerror}"))
    except Exception as error:  # a damaged file may confuse a library; this must not stop the next file from being read
        return pickle.dumps(("error", f"is damaged: {type(error).__name__}: {visible(str(error))[:200]}"))
    finally:
        limits.limit_memory(None)


if __name__ == "__main__":
    limits.serve(_answer)
