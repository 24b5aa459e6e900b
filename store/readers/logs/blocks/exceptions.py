"""Read an exception from a traceback (interleaved with other ranks' lines), from its last line, or from an error file.

found = read_traceback(lines, prefix)      # {"type": "ValueError", "message": ..., "traceback": ...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from store.readers.logs.prefix import Prefix

__all__ = [
    "MAX_FRAMES_TEXT",
    "MAX_LINES",
    "MAX_MESSAGE",
    "RAISED",
    "frames_above",
    "rank_in_head",
    "read_error_file",
    "read_last_line",
    "read_quoted_traceback",
    "read_terminate",
    "read_traceback",
]

MAX_LINES = 600
"""Maximum lines of a block after its first, including interleaved lines of other ranks."""
OTHERS_BETWEEN = 20
"""Maximum lines of other ranks between two lines of a traceback without its head."""
MAX_FRAMES_TEXT = 16_000
MAX_MESSAGE = 2_000
MESSAGE_LINES = 12
TERMINAL_COLUMNS = 80
"""Width at which rich wraps lines if the output is not a terminal. Source: its Console."""
MAX_JSON_LINES = 200
RAISED = re.compile(
    r"^(?!LustreError)(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Failure|Empty|Iteration|"
    r"Refused|Aborted|OutOfMemory\w*|Stop\w*)|(?:[a-z_]\w*\.)+(?:_?[A-Z]\w*|[a-z]*error|timeout))(?::\s?(?P<message>.*))?$"
)
_UNCAUGHT = re.compile(r"^(?:Uncaught|Unhandled)(?: exception)?:? ")
_NEW = re.compile(
    r"^(?:Traceback \(most|The above exception was|During handling of|=====|-----|frame #|Call stack:$|Exception "
    r"raised from)"
)
_GROUP = re.compile(r"( {2,})(?:\+ Exception Group |\| )Traceback \(most")
"""Head of an exception group's traceback, or of one of its exceptions, each line of which has a margin."""
_GROUP_RULE = re.compile(r" *\+[-+]{4,}")
"""Line between the exceptions of a group."""
_QUOTED = re.compile(r"\(most recent call last\):\\n(.*)$")
"""Traceback that a program printed in one line, as the repr of a text or of a list of lines."""
_QUOTED_BREAK = re.compile(r"\\n(?:['\"], ?['\"])?")
_CHAINED = re.compile(r"^(?:The above exception was the direct|During handling of the above)")
_RECORD = re.compile(
    r"^(?:(?:slurmstepd|srun|mpirun): |(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]+:\S|[EWIF]\d{4} \d\d:\d\d:\d\d|"
    r"\[?\d{4}-\d\d-\d\d[ T_]\d\d:\d\d)"
)
"""Prefixes of launcher or logger lines, which may directly follow an exception without belonging to it."""
_ANOTHER = re.compile(_NEW.pattern + r"|[A-Z]{3,}\b|\S*Error\b|\w[\w.]*:\S")
"""Starts of lines that cannot continue a wrapped line: a logger's line, or another exception."""
_UNHANDLED = re.compile(r"Unhandled exception: \S{1,200}\. what\(\): (.+)")
"""Line that Ray's handler of std::terminate prints."""
_THROWN = re.compile(r"throwing an instance of '([\w:<>, *&]{1,200})'")
_WHAT = re.compile(r"^\s*what\(\): +(.*)$")
_CAUGHT = re.compile(r"Caught \w+ in (DataLoader worker process \d+|replica \d+ on device \d+|\w+ worker[\w ]*)\.?$")
"""Message of an exception that torch re-raises, which contains the traceback of the original."""
_UNREADABLE = "UnserializableException"
"""Ray's exception for one that it could not unpickle; it contains the traceback of the original."""
_OWN_RANK = re.compile(
    r"(?:\(PID:\d{1,10}, Device:-?\d{1,4}, RankID:|\[Rank:|\(most recent call last\): \(RANK )"
    r"(\d{1,6})(?:\)|\](?= FATAL ERROR| Habana exception))"
)
"""Forms in which torch_npu, Habana's bridge and torch.distributed.checkpoint name the rank that raised an error."""
_SNIPPET = re.compile(r"^\[Rank (\d{1,6}(?:,\d{1,6}){0,4095}) Error Snippet\]:\s*$")
"""Line above the end of a traceback that Ray Train's controller quotes, with the ranks that raised the error."""
_SPAWNED = re.compile(r"^-- Process (\d{1,6}) terminated with the following error:")
"""Line of torch.multiprocessing.spawn above the traceback of a process; programs start one process per local rank."""
_EVENT = "torchelastic.worker.status."
_CUT_ERROR = re.compile(r'\{"message": \{"message": "((?:[^"\\]|\\.)*)"')


def read_traceback(lines: Iterable[tuple[Prefix, str]], writer: Prefix, head: str = "") -> dict[str, Any] | None:
    """Read the exception below `head`, "Traceback (most recent call last):", from lines of the same stream. `is_cut` is
    set if the file ends within its frames. Returns None if unrelated lines follow the frames.

    `lines` are (prefix, text after it). Lines of other ranks in between are left out.
    """
    frames: list[str] = []
    found: dict[str, Any] | None = None
    message: list[str] = []
    is_over = is_timed = has_message = is_unread = False
    num_lines = 0
    margin = f"{group[1]}| " if (group := _GROUP.search(head)) else ""
    for prefix, text in lines:
        num_lines += 1
        if prefix.stream != writer.stream:
            continue
        line = text.rstrip().removeprefix(margin)
        if margin and _GROUP_RULE.match(line):
            if found is None:
                return None  # the errors themselves follow
            break
        if is_over and found is not None:  # an empty line has ended the message: look at the first line after it
            if line:
                found |= {"chained": 1} if _CHAINED.match(line) else {}
                break
            continue
        if found is None:
            raised = RAISED.match(line.strip("│ ")) if not line.startswith("  ") else None
            if raised is not None:
                found = {"type": raised["type"], "traceback": "\n".join(frames)[-MAX_FRAMES_TEXT:]}
                has_message = raised["message"] is not None
                first = (raised["message"] or "").lstrip()
                is_timed = prefix.wall_ns is not None  # True if the log collector wrote a time before each line
                message = ["" if first.startswith('File "') else raised["message"] or ""]  # another writer's frame
            elif _NEW.match(line) and frames:
                return None  # tracebacks of two writers are interleaved, and no prefix tells them apart
            elif line:
                frames.append(line)
            continue
        is_caught = _CAUGHT.match(message[0])
        is_unread |= found["type"].endswith(_UNREADABLE)
        if (
            not line
            or line == '"""'  # the end of a pool worker's traceback, which its parent quotes
            or _NEW.match(line)
            or _RECORD.match(line)
            or len(message) > MESSAGE_LINES * (8 if is_caught or is_unread else 1)
            or (prefix.wall_ns is not None and not is_timed)
        ):
            if line:
                found |= {"chained": 1} if _CHAINED.match(line) else {}
                break
            is_over = True
            continue
        if not has_message and len(message) == 1 and line.startswith("  "):
            break  # another writer's frame
        if (is_caught or is_unread) and (inner := RAISED.match(line)) is not None:
            found["type"] = inner["type"]
            if is_caught or any(one.startswith('  File "') for one in message):
                found["traceback"] = "\n".join(message[1:])[-MAX_FRAMES_TEXT:]
            message = [f"{inner['message'] or ''} (in {is_caught[1]})" if is_caught else inner["message"] or ""]
            continue
        message.append(line)
    if found is None and num_lines < MAX_LINES and frames and all(line.startswith("  ") for line in frames):
        return {"type": "", "message": "", "traceback": "\n".join(frames)[-MAX_FRAMES_TEXT:], "is_cut": 1}
    if found is not None:
        found["message"] = "\n".join(message).strip()[:MAX_MESSAGE]
        found |= _stated_rank(f"{head}\n{found['message']}")
    return found


def read_quoted_traceback(text: str, writer: Prefix) -> dict[str, Any] | None:
    """Read the exception of a traceback that a line quotes, with `\\n` between its lines. None if there is none."""
    quoted = _QUOTED.search(text)
    if quoted is None:
        return None
    rest = quoted[1].removeprefix("', '").removeprefix('", "').replace("\\'", "'").replace('\\"', '"')
    *lines, last = _QUOTED_BREAK.split(rest)
    return read_traceback(((writer, line) for line in (*lines, last.rstrip("\"')]}"))), writer, text)


def _stated_rank(message: str) -> dict[str, Any]:
    """{"own_rank": rank} if a text names the rank that raised the error, otherwise {}."""
    ranks = set(_OWN_RANK.findall(message))
    return {"own_rank": int(ranks.pop())} if len(ranks) == 1 else {}


def read_last_line(text: str, lines: Iterable[tuple[Prefix, str]], writer: Prefix) -> dict[str, Any] | None:
    """Read the exception from the last line of a traceback; None if the line has none.

    `lines` follow it. The message includes the line after a trailing colon, and lines wrapped at the terminal's width.
    """
    raised = RAISED.match(_UNCAUGHT.sub("", text.strip()))
    if raised is None or not raised["message"]:
        return None
    message, before = raised["message"].strip(), text.rstrip()
    is_signed = False
    for place, (prefix, line) in enumerate(lines):
        is_signed |= place == 0 and _OWN_RANK.search(line) is not None
        if is_signed:  # by torch_npu, after whose message a report of the runtime follows, up to the next empty line
            if not line.strip() or _NEW.match(line) or place >= MESSAGE_LINES or prefix.stream[1:] != writer.stream[1:]:
                break
            message += f"\n{line.strip()}"
            continue
        word = line.split(" ", 1)[0]
        if place == 0 and before.endswith(":") and not word and line.strip() and prefix.stream == writer.stream:
            message += f"\n{line.strip()}"
            break
        is_broken = len(before) <= TERMINAL_COLUMNS < len(before) + 1 + len(word)
        if (
            not word
            or not is_broken
            or (prefix.length and not writer.length)
            or _ANOTHER.match(line)
            or place >= MESSAGE_LINES
        ):
            break
        message += f" {line.strip()}"
        before = line.rstrip()
    return {"type": raised["type"], "message": message[:MAX_MESSAGE], "traceback": "", **_stated_rank(message)}


def rank_in_head(lines: Iterable[tuple[Prefix, str]], writer: Prefix) -> dict[str, Any]:
    """{"own_rank": rank} if the head of a traceback names the rank that raised it, {"ranks": "0,3"} if several did,
    {"local_rank": 3} below the line of a process that torch.multiprocessing spawned.

    `lines`: the lines above the traceback's first or last line.
    """
    is_in_chain = False
    for prefix, text in lines:
        if prefix.stream != writer.stream or text.startswith("  "):
            continue
        if snippet := _SNIPPET.match(text):
            return {"ranks": snippet[1]} if "," in snippet[1] else {"own_rank": int(snippet[1])}
        if spawned := _SPAWNED.match(text):
            return {"local_rank": int(spawned[1])}
        if _NEW.match(text) and (stated := _stated_rank(text)):
            return stated
        is_head = text.startswith("Traceback (most recent call last)")
        is_in_chain = (is_in_chain and not is_head) or _CHAINED.match(text) is not None
        if text and not is_head and not (is_in_chain and (_CHAINED.match(text) or RAISED.match(text))):
            return {}
    return {}


def frames_above(lines: Iterable[tuple[Prefix, str]], writer: Prefix) -> str:
    """The frames above the last line of a traceback, if the traceback's head was cut off. Empty if the head is there,
    because `read_traceback` then reads the frames.

    `lines`: the lines above the last line, the nearest first.
    """
    frames: list[str] = []
    others = 0
    for prefix, text in lines:
        if prefix.stream != writer.stream:
            others += 1
            if others > OTHERS_BETWEEN:
                break
            continue
        if not text.startswith("  "):
            if "Traceback (most recent call last)" in text:
                return ""
            break
        frames.insert(0, text.rstrip())
    return "\n".join(frames) if any(frame.startswith('  File "') for frame in frames) else ""


def read_terminate(text: str, lines: Iterable[tuple[Prefix, str]], writer: Prefix) -> dict[str, Any] | None:
    """Read a C++ exception that ended the process: its type, and the text of `what()` on one of the next lines."""
    thrown = _THROWN.search(text)
    if thrown is None:
        unhandled = _UNHANDLED.search(text)
        return {"type": "RuntimeError", "message": unhandled[1][:MAX_MESSAGE], "traceback": ""} if unhandled else None
    for place, (prefix, line) in enumerate(lines):
        if prefix.stream == writer.stream and (what := _WHAT.match(line)):
            message = what[1][:MAX_MESSAGE]
            return {"type": thrown[1].split("::")[-1], "message": message, "traceback": "", **_stated_rank(message)}
        if place >= 8:
            break
    return None


def read_error_file(text: str, lines: Iterable[tuple[Prefix, str]], writer: Prefix) -> dict[str, Any] | None:
    """Read torchelastic's `error.json`: on one line, as the launcher prints it, or quoted in an event. None for other
    JSON.
    """
    if _EVENT in text:
        return _read_event(text)
    text = text[text.find("{") :] if "{" in text[: text.find('"')] else "{" + text
    content = _object(text)
    if content is None and text.rstrip().endswith("{"):
        parts = [text]
        for place, (prefix, line) in enumerate(lines):
            if place >= MAX_JSON_LINES:
                break
            if prefix.stream == writer.stream:
                parts.append(line)
                if line.startswith("}") and (content := _object("\n".join(parts))) is not None:
                    break
    if content is None and (cut := _CUT_ERROR.match(text)):  # the JSON is cut off within the traceback
        content = _object(f'{{"message": {{"message": "{cut[1]}"}}}}')
    message = content.get("message") if content is not None else None
    if not isinstance(message, dict) or "message" not in message:
        return None
    info = message.get("extraInfo")
    stack = info.get("py_callstack", "") if isinstance(info, dict) else ""
    kind, _, rest = str(message["message"]).partition(":")
    return {
        "type": kind.strip()[:200],
        "message": rest.strip()[:MAX_MESSAGE],
        "traceback": ("".join(map(str, stack)) if isinstance(stack, list) else str(stack))[-MAX_FRAMES_TEXT:],
    }


def _read_event(text: str) -> dict[str, Any] | None:
    """Read the error in torchelastic's event on a worker that failed."""
    about = (_object(text[text.find("{") :]) or {}).get("metadata")
    raw = about.get("raw_error") if isinstance(about, dict) else None
    found = read_error_file(raw, (), Prefix()) if isinstance(raw, str) and '"' in raw and _EVENT not in raw else None
    rank = about.get("global_rank") if isinstance(about, dict) else None
    return found and found | ({"own_rank": rank} if isinstance(rank, int) else {})


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
