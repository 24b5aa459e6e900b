"""Read stacks of a process: `py-spy dump` (text or `--json`), and backtraces of gdb and cuda-gdb.

The training thread is taken to be Python's main thread or gdb's thread 1, or else the first thread with frames.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from store.readers.programs.rows import ProgramRows, StackOfProcess
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import REPORT_BYTES, rank_of_name

NAME = "stacks of a process (py-spy, gdb)"
MAX_FRAMES = 60
_JSON = re.compile(rb"\[\s*\{")
_PROCESS = re.compile(r"^Process (\d{1,9}):", re.MULTILINE)
_SPY_THREAD = re.compile(r'^Thread .*?(?:"([^"]*)")?\s*$')
_SPY_FRAME = re.compile(r"^\s+(.{1,300}?) \((.{1,300}?)(?::(\d{1,9}))?\)$")
_GDB_THREAD = re.compile(r"^Thread (\d+) \(.*?(?:LWP (\d{1,9}))?\)")
_GDB_FRAME = re.compile(r"^#(\d+)\s+(?:0x[0-9a-f]+ in )?(.+?) \(.*?\)?(?: (?:at|from) (\S+))?$")


def recognise(first: bytes) -> bool:
    """Return True for the start of a py-spy dump, as text or JSON, or of a backtrace."""
    text = first.lstrip()
    if text.startswith(b"Process ") and b"\nPython v" in first and b"\nThread " in first:
        return True
    if _JSON.match(text) and b'"thread_name"' in first and b'"frames"' in first:
        return True
    return (
        re.search(rb"^#0 +(?:0x[0-9a-f]+ in )?\S.*\(", first, re.MULTILINE) is not None
        and re.search(rb"^#1 ", first, re.MULTILINE) is not None
    )


def read(path: Path) -> ProgramRows:
    """Read each process; a file may hold several dumps."""
    text = read_text(path, REPORT_BYTES)
    rank = rank_of_name(path) if "rank" in path.name.lower() else None
    if _JSON.match(text.lstrip().encode()):
        return ProgramRows(stacks=list(_of_json(text, rank)))
    starts = [match.start() for match in _PROCESS.finditer(text)] or [0]
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    is_spy = "\nPython v" in text
    found = [stack for part in parts if (stack := (_of_spy if is_spy else _of_gdb)(part, rank)) is not None]
    return ProgramRows(stacks=found)


def _of_spy(text: str, rank: int | None) -> StackOfProcess | None:
    process = _PROCESS.search(text)
    threads: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if thread := _SPY_THREAD.match(line):
            threads.append((thread[1] or "", []))
        elif threads and (frame := _SPY_FRAME.match(line)):
            threads[-1][1].append(frame_text(frame[2], frame[3], frame[1]))
    return stack_of(threads, int(process[1]) if process else 0, rank)


def _of_json(text: str, rank: int | None) -> Iterator[StackOfProcess]:
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return
    by_pid: dict[int, list[tuple[str, list[str]]]] = {}
    for thread in listed if isinstance(listed, list) else ():
        if not isinstance(thread, dict) or not isinstance(thread.get("frames"), list):
            continue
        pid = thread.get("pid") if isinstance(thread.get("pid"), int) else 0
        frames = [_json_frame(frame) for frame in thread["frames"][:MAX_FRAMES] if isinstance(frame, dict)]
        by_pid.setdefault(int(pid or 0), []).append((str(thread.get("thread_name") or ""), frames))
    for pid, threads in by_pid.items():
        if (stack := stack_of(threads, pid, rank)) is not None:
            yield stack


def _json_frame(frame: dict[str, Any]) -> str:
    file = frame.get("short_filename") or frame.get("filename") or "?"
    return frame_text(str(file)[:300], str(frame.get("line") or ""), str(frame.get("name") or "?")[:300])


def _of_gdb(text: str, rank: int | None) -> StackOfProcess | None:
    threads: list[tuple[str, list[str]]] = []
    pid = 0
    for line in text.splitlines():
        if thread := _GDB_THREAD.match(line):
            threads.append(("MainThread" if thread[1] == "1" else "", []))
            pid = int(thread[2]) if thread[2] and thread[1] == "1" else pid
        elif frame := _GDB_FRAME.match(line):
            if frame[1] == "0" and (not threads or threads[-1][1]):
                threads.append(("", []))
            where = frame[3] or "?"
            file, number = where.rsplit(":", 1) if ":" in where else (where, "")
            threads[-1][1].append(frame_text(file, number, frame[2].split("(")[0][:300]))
    return stack_of(threads, pid, rank)


def stack_of(threads: list[tuple[str, list[str]]], pid: int, rank: int | None) -> StackOfProcess | None:
    """The stack of the main thread, or else of the first thread with frames."""
    main = next((frames for name, frames in threads if name == "MainThread" and frames), None)
    main = main or next((frames for _, frames in threads if frames), None)
    return StackOfProcess(pid=pid, rank=rank, frames=tuple(main[:MAX_FRAMES])) if main else None


def frame_text(file: str, line: str | None, function: str) -> str:
    """A frame as `folder/file.py:120 function`."""
    inside = file.rpartition("site-packages/")[2]
    place = inside if inside.startswith("torch/") else "/".join(file.split("/")[-2:])
    return f"{place}:{line} {function}" if line else f"{place} {function}"
