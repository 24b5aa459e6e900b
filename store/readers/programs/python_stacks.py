"""Read stacks in the form of Python's tracebacks: `pystack remote` and `core`, gdb's `py-bt`, and the files
`hccl_trace_rank_3_py_traceback` that torch_npu writes next to flight-recorder dumps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from store.readers.programs.process_stacks import frame_text, stack_of
from store.readers.programs.rows import ProgramRows
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import REPORT_BYTES, rank_of_name

NAME = "stacks of a process (pystack, py-bt, torch_npu)"
_THREAD = re.compile(
    r"^(?:Traceback for thread (?P<tid>\d{1,9}) .*|thread <?(?P<name>.*)>?:$|"
    r"Thread \d{1,9} \(.*?(?:LWP (?P<lwp>\d{1,9}))?\).*|(?P<frames>Traceback \(most recent call first\):))"
)
_FRAME = re.compile(
    r'^\s+(?:\((?P<kind>Python|C)\) )?File "(?P<file>[^"]{1,500})", line (?P<line>\d{1,9}),? in (?P<name>.+)$'
)
_PID = re.compile(r"^\s*pid: (\d{1,9})\b", re.MULTILINE)
_INNERMOST_FIRST = "Traceback (most recent call first):"
_MARKS = (
    re.compile(rb"(?m)^Traceback for thread \d+ .*\(most recent call last\):$"),
    re.compile(rb"^pid: \d+\nthread "),
    re.compile(rb"(?m)^Traceback \(most recent call first\):$"),
)


@dataclass(slots=True)
class _Thread:
    is_main: bool
    tid: int
    python: list[str] = field(default_factory=list)
    native: list[str] = field(default_factory=list)

    @property
    def frames(self) -> list[str]:
        return self.python or self.native


def recognise(first: bytes) -> bool:
    """Return True for the thread headings, which the log of a failing program lacks."""
    return b'File "' in first and any(mark.search(first) for mark in _MARKS)


def read(path: Path) -> ProgramRows:
    """Read the training thread: Python's main thread, or else a thread with the outermost frame `<module>`, or else the
    first thread."""
    text = read_text(path, REPORT_BYTES)
    threads = [thread for thread in _threads(text) if thread.frames]
    outermost = -1 if _INNERMOST_FIRST in text else 0
    main = next((thread for thread in threads if thread.is_main), None)
    main = main or next((one for one in threads if one.frames[outermost].endswith(" <module>")), None)
    main = main or next(iter(threads), None)
    if main is None:
        return ProgramRows()
    rank = rank_of_name(path) if "rank" in path.name.lower() else None
    pid = int(match[1]) if (match := _PID.search(text)) else main.tid
    stack = stack_of([("", main.frames if outermost else main.frames[::-1])], pid, rank)
    return ProgramRows(stacks=[stack] if stack is not None else [])


def _threads(text: str) -> list[_Thread]:
    found: list[_Thread] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            if thread["frames"] and found and not found[-1].frames:
                continue  # this is Python's heading of a thread; gdb's heading of the same thread was just above
            found.append(_Thread("MainThread" in (thread["name"] or ""), int(thread["tid"] or thread["lwp"] or 0)))
        elif found and (frame := _FRAME.match(line)):
            name = re.sub(r" \(.*\)$", "", frame["name"])[:300]
            frames = found[-1].native if frame["kind"] == "C" else found[-1].python
            frames.append(frame_text(frame["file"], frame["line"], name))
    return found
