"""Read blocks of lines: Python tracebacks interleaved with those of other ranks, torchrun's table of failures, etc.

found = read_traceback(lines, stream)      # {"type": "ValueError", "message": ..., "traceback": ...}
found = read_failure(lines)                # {"rank": 3, "exitcode": -9, "pid": 71, "host": ...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from store.readers.logs.prefix import Prefix

__all__ = [
    "MAX_LINES",
    "read_culprits",
    "read_error_file",
    "read_failure",
    "read_last_line",
    "read_lost_bus",
    "read_norms",
    "read_others",
    "read_ras",
    "read_stalled",
    "read_tasks",
    "read_terminate",
    "read_traceback",
    "read_usage",
]

MAX_LINES = 600
"""Maximum lines of a block after its first, including interleaved lines of other ranks."""
MAX_FRAMES_TEXT = 16_000
MAX_MESSAGE = 2_000
MESSAGE_LINES = 12
TERMINAL_COLUMNS = 80
"""Width at which rich wraps lines if the output is not a terminal. Source: its Console."""
MAX_JSON_LINES = 200
BUS_LINES = 4
_ADDRESS = re.compile(r"\b(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d\b")
_RAISED = re.compile(
    r"^(?!LustreError)(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Timeout|Failure|Empty|Iteration|"
    r"Refused|Aborted|OutOfMemory\w*|Stop\w*)|(?:[a-z_]\w*\.)+[A-Z]\w*)(?::\s?(?P<message>.*))?$"
)
_UNCAUGHT = re.compile(r"^(?:Uncaught|Unhandled)(?: exception)?:? ")
_NEW = re.compile(
    r"^(?:Traceback \(most|The above exception was|During handling of|=====|-----|frame #|Call stack:$|Exception "
    r"raised from)"
)
_CHAINED = re.compile(r"^(?:The above exception was the direct|During handling of the above)")
_ANOTHER = re.compile(_NEW.pattern + r"|[A-Z]{3,}\b|\S*Error\b|\w[\w.]*:\S")
"""Line starts that cannot continue a wrapped line: a logger's line, another exception."""
_USAGE = re.compile(r"^[\w./-]{1,120}: error: (\S.{3,400})")
_LAUNCHED = re.compile(r"launched up to operation (\d{1,18})")
_RAS_RANK = re.compile(r"^\s*Rank (\d{1,6}) -- ")
_RAS_PROCESS = re.compile(r"^\s*Process (\d{1,10}) on node \S+ managing GPU")
_NORM = re.compile(r"^\s*rank\s+(\d{1,6}) = (\S+)$")
_STALLED = re.compile(r"^(\d{1,6})!?: \[")
_STALLED_OPERATION = re.compile(r"\[missing ranks: ([\d, ]+)\]")
_STALLED_READY = re.compile(r"\[ready ranks: (\d[\d, ]*)\]")
_UNHANDLED = re.compile(r"Unhandled exception: \S{1,200}\. what\(\): (.+)")
"""Line that Ray's handler of std::terminate prints."""
_THROWN = re.compile(r"throwing an instance of '([\w:<>, *&]{1,200})'")
_WHAT = re.compile(r"^\s*what\(\): +(.*)$")
_CULPRIT = re.compile(r"Culprit rank (\d{1,6}); Error type: (\w+)")
_CAUGHT = re.compile(r"Caught \w+ in (DataLoader worker process \d+|replica \d+ on device \d+|\w+ worker[\w ]*)\.?$")
"""Message of an exception that torch re-raises, which contains the traceback of the original."""
_OWN_RANK = re.compile(
    r"(?:\(PID:\d{1,10}, Device:-?\d{1,4}, RankID:|\[Rank:)(\d{1,6})(?:\)|\](?= FATAL ERROR| Habana exception))"
)
"""How torch_npu and Habana's bridge mark an error with the rank."""
_TASK = re.compile(r"^\s*/job:\w+/replica:\d+/task:(\d{1,6})\b")
_CUT_ERROR = re.compile(r'\{"message": \{"message": "((?:[^"\\]|\\.)*)"')
_KEY = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)$")


def read_traceback(lines: Iterable[tuple[Prefix, str]], own: Prefix) -> dict[str, Any] | None:
    """Read the exception below "Traceback (most recent call last):" from lines of the same stream; None if cut off.

    `lines` are (prefix, text after it). Lines of other ranks in between are left out.
    """
    frames: list[str] = []
    found: dict[str, Any] | None = None
    message: list[str] = []
    is_over = False
    for prefix, text in lines:
        if prefix.stream != own.stream:
            continue
        line = text.rstrip()
        if is_over and found is not None:  # the line after an empty one
            if line:
                found |= {"chained": 1} if _CHAINED.match(line) else {}
                break
            continue
        if found is None:
            raised = _RAISED.match(line.strip("│ ")) if not line.startswith("  ") else None
            if raised is not None:
                found = {"type": raised["type"], "traceback": "\n".join(frames)[-MAX_FRAMES_TEXT:]}
                first = (raised["message"] or "").lstrip()
                message = ["" if first.startswith('File "') else raised["message"] or ""]  # another writer's frame
            elif _NEW.match(line) and frames:
                return None  # two writers without prefixes interleave
            elif line:
                frames.append(line)
            continue
        is_caught = _CAUGHT.match(message[0])
        if (
            not line
            or _NEW.match(line)
            or len(message) > MESSAGE_LINES * (8 if is_caught else 1)
            or (prefix.wall_ns is not None)
        ):
            if line:
                found |= {"chained": 1} if _CHAINED.match(line) else {}
                break
            is_over = True
            continue
        if is_caught and (inner := _RAISED.match(line)) is not None:
            found["type"] = inner["type"]
            found["traceback"] = "\n".join(message[1:])[-MAX_FRAMES_TEXT:]
            message = [f"{inner['message'] or ''} (in {is_caught[1]})"]
            continue
        message.append(line)
    if found is not None:
        found["message"] = "\n".join(message).strip()[:MAX_MESSAGE]
        found |= _signed(found["message"])
    return found


def _signed(message: str) -> dict[str, Any]:
    """{"own_rank": rank} if the message names its rank in torch_npu's or Habana's form, else {}."""
    ranks = set(_OWN_RANK.findall(message))
    return {"own_rank": int(ranks.pop())} if len(ranks) == 1 else {}


def read_last_line(text: str, lines: Iterable[tuple[Prefix, str]], own: Prefix) -> dict[str, Any] | None:
    """Read the exception from the last line of a traceback; None if the line has none.

    `lines` follow it. The line after a trailing colon, and lines wrapped at the terminal's width, belong to it.
    """
    raised = _RAISED.match(_UNCAUGHT.sub("", text.strip()))
    if raised is None or not raised["message"]:
        return None
    message, before = raised["message"].strip(), text.rstrip()
    is_signed = False
    for place, (prefix, line) in enumerate(lines):
        is_signed |= place == 0 and _OWN_RANK.search(line) is not None
        if is_signed:  # torch_npu: the runtime's report follows, up to the next empty line
            if not line.strip() or _NEW.match(line) or place >= MESSAGE_LINES or prefix.stream[1:] != own.stream[1:]:
                break
            message += f"\n{line.strip()}"
            continue
        word = line.split(" ", 1)[0]
        if place == 0 and before.endswith(":") and not word and line.strip() and prefix.stream == own.stream:
            message += f"\n{line.strip()}"
            break
        is_broken = len(before) <= TERMINAL_COLUMNS < len(before) + 1 + len(word)
        if not word or not is_broken or prefix.length or _ANOTHER.match(line) or place >= MESSAGE_LINES:
            break
        message += f" {line.strip()}"
        before = line.rstrip()
    return {"type": raised["type"], "message": message[:MAX_MESSAGE], "traceback": "", **_signed(message)}


def read_usage(text: str) -> dict[str, Any] | None:
    """Read the error that argparse prints for an invalid command line; None for any other line."""
    found = _USAGE.match(text)
    return {"type": "ArgumentError", "message": found[1], "traceback": ""} if found else None


def read_lost_bus(text: str, lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any] | None:
    """Read the bus address of a GPU that the driver's next lines report as fallen off the bus; None if they do not."""
    address = _ADDRESS.search(text)
    for place, (_, line) in enumerate(lines):
        if place >= BUS_LINES:
            break
        if address and "fallen off the bus" in line:
            return {"bus": address[0]}
    return None


def read_failure(lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read the root-cause row of torchrun's table: rank, local rank, host, exit code, pid, signal, time, error."""
    found: dict[str, Any] = {}
    rest: list[str] = []
    for _, text in lines:
        if text.startswith("=====") or (text.startswith("-----") and found):
            break
        match = _KEY.match(text)
        if match is None:
            if "traceback" in found and len(rest) < 200:
                rest.append(text)
            continue
        key, value = match[1], match[2].strip()
        numbers: list[int | None] = [int(number) for number in re.findall(r"-?\d+", value)[:2]]
        if key == "rank" and numbers:
            found["rank"], found["local_rank"] = numbers[0], (numbers[1:] or [None])[0]
        elif key == "exitcode" and numbers:
            found["exitcode"], found["pid"] = numbers[0], (numbers[1:] or [None])[0]
        elif key in ("rank", "exitcode"):
            continue
        else:
            found[key] = value[:300]
    text = str(found.get("traceback", ""))
    if signal := re.search(r"Signal \d+ \((SIG\w+)\)", text):
        found["signal"] = signal[1]
    for line in reversed(rest):
        if raised := _RAISED.match(line.strip()):
            found["type"], found["message"] = raised["type"], (raised["message"] or "")[:MAX_MESSAGE]
            found["traceback"] = "\n".join(rest)[-MAX_FRAMES_TEXT:]
            break
    return found


def read_others(lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read the other rows of torchrun's table, except ranks that the launcher ended by SIGTERM.

    Each is `rank@time` in `others`, and `pid=rank` in `processes`.
    """
    found: list[str] = []
    processes: list[str] = []
    time = ""
    for _, text in lines:
        if text.startswith(("=====", "Root Cause")):
            break
        match = _KEY.match(text)
        if match and match[1] == "time":
            time = match[2].strip()
        elif match and match[1] == "rank" and (number := re.match(r"\d{1,6}", match[2].strip())):
            found.append(f"{number[0]}@{time}")
        elif match and match[1] == "exitcode" and match[2].strip().startswith("-15 ") and found:
            found.pop()
        elif match and match[1] == "exitcode" and found and (pid := re.search(r"pid: (\d{1,10})", match[2])):
            processes.append(f"{pid[1]}={found[-1].partition('@')[0]}")
    return {"others": ", ".join(found[:64]), "processes": ", ".join(processes[:64])}


def read_ras(lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read the ranks below a warning of NCCL's RAS: missing ones, or those that have launched the fewest operations.

    If RAS lists a single process without a rank, `pid` is returned.
    """
    counts: list[tuple[int, list[int]]] = []
    ranks: list[int] = []
    pids: list[int] = []
    for _, text in lines:
        if process := _RAS_PROCESS.search(text):
            pids.append(int(process[1]))
        elif launched := _LAUNCHED.search(text):
            counts.append((int(launched[1]), []))
        elif rank := _RAS_RANK.search(text):
            (counts[-1][1] if counts else ranks).append(int(rank[1]))
        elif not text.strip():
            break
    least = min((number for number, _ in counts), default=0)
    for number, listed in counts:
        ranks += listed if number == least else []  # only the ranks with the lowest count are behind
    found: dict[str, Any] = {"ranks": ", ".join(map(str, ranks[:512]))}
    if counts:
        found |= {"launched": least, "most_launched": max(number for number, _ in counts)}
    return found | ({"pid": pids[0]} if len(pids) == 1 else {})


def read_norms(lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read fairseq's list of gradient norms per rank: all listed ranks, and those whose norm is not finite."""
    norms = [(int(match[1]), match[2]) for _, text in lines if (match := _NORM.match(text))]
    bad = [rank for rank, norm in norms if norm.lower().lstrip("-") in ("nan", "inf")]
    return {"listed": len(norms), "ranks": ", ".join(map(str, bad[:512])), "nonfinite": len(bad)}


def read_stalled(text: str, lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read the ranks that Horovod's stall inspector lists as missing: `3: [allreduce.x]`, or `[missing ranks: 3]`.

    Up to version 0.15, the line itself lists, for each tensor, the `ready` ranks, which wait for the others.
    """
    if ready := _STALLED_READY.findall(text):
        ranks = dict.fromkeys(rank for every in ready[:512] for rank in every.replace(" ", "").split(","))
        return {"ready": ", ".join(ranks)}
    found: list[str] = []
    for place, (prefix, text) in enumerate(lines):
        if prefix.task is not None and text.startswith("["):  # a number at the line start was read as a task
            found.append(str(prefix.task))
        elif rank := _STALLED.match(text.strip()):
            found.append(rank[1])
        elif operation := _STALLED_OPERATION.search(text):
            found += operation[1].replace(" ", "").split(",")
        elif found or place > 2:
            break
    return {"ranks": ", ".join(dict.fromkeys(found[:512]))}


def read_culprits(text: str) -> dict[str, Any] | None:
    """Read the culprit ranks that torchfrtrace lists for one call, and the first error type; None if there are none."""
    found = _CULPRIT.findall(text)
    if not found:
        return None
    return {"ranks": ", ".join(dict.fromkeys(rank for rank, _ in found[:4096])), "error": found[0][1]}


def read_tasks(lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read the tasks that JAX's coordinator lists, one per line; each is a process."""
    found: list[str] = []
    for _, text in lines:
        task = _TASK.match(text)
        if task is None:
            break
        found.append(task[1])
    return {"ranks": ", ".join(found[:512])}


def read_terminate(text: str, lines: Iterable[tuple[Prefix, str]], own: Prefix) -> dict[str, Any] | None:
    """Read a C++ exception that ended the process: its type, and the text of `what()` on one of the next lines."""
    thrown = _THROWN.search(text)
    if thrown is None:
        unhandled = _UNHANDLED.search(text)
        return {"type": "RuntimeError", "message": unhandled[1][:MAX_MESSAGE], "traceback": ""} if unhandled else None
    for place, (prefix, line) in enumerate(lines):
        if prefix.stream == own.stream and (what := _WHAT.match(line)):
            message = what[1][:MAX_MESSAGE]
            return {"type": thrown[1].split("::")[-1], "message": message, "traceback": "", **_signed(message)}
        if place >= 8:
            break
    return None


def read_error_file(text: str, lines: Iterable[tuple[Prefix, str]], own: Prefix) -> dict[str, Any] | None:
    """Read torchelastic's `error.json`, on one line or as the launcher prints it; None for other JSON."""
    text = text[text.find("{") :] if "{" in text[: text.find('"')] else "{" + text
    about = _object(text)
    if about is None and text.rstrip().endswith("{"):
        parts = [text]
        for place, (prefix, line) in enumerate(lines):
            if place >= MAX_JSON_LINES:
                break
            if prefix.stream == own.stream:
                parts.append(line)
                if line.startswith("}") and (about := _object("\n".join(parts))) is not None:
                    break
    if about is None and (cut := _CUT_ERROR.match(text)):  # the traceback ends above the line that raised
        about = _object(f'{{"message": {{"message": "{cut[1]}"}}}}')
    message = about.get("message") if about is not None else None
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


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
