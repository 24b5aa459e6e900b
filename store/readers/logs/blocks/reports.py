"""Read blocks of lines that launchers and tools print, such as torchrun's table of failures.

found = read_failure(lines)                # {"rank": 3, "exitcode": -9, "pid": 71, "host": ...}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from store.readers.logs.blocks.exceptions import MAX_FRAMES_TEXT, MAX_MESSAGE, RAISED
from store.readers.logs.prefix import Prefix

__all__ = ["READERS_OF_BLOCK", "READERS_OF_LINE", "READERS_OF_LINE_AND_BLOCK", "read_frames"]

BUS_LINES = 4
ACTOR_LINES = 12
PORT_LINES = 40
"""Lines of a device with two ports, as ibstat prints it."""
FRAMES = 24
"""Lines below a signal's line that may be its stack."""
_FRAME = re.compile(r"^\s*\[ *\d{1,3}\] (?P<path>/[^\s()]+)\((?P<symbol>[\w.@]*)\+0x[0-9a-f]+\)")
_OF_SYSTEM = re.compile(r"/(?:libpthread|libc|libm|libgcc_s|libstdc\+\+|ld-linux)[-.\w]*$")
"""Libraries that every program calls; the innermost frame outside of them is reported."""
_ACTOR = re.compile(r"^\s+(?:class_name|actor_id|pid|name|namespace|ip): |^The actor is dead because")
_ACTOR_PID = re.compile(r"(?:^\s+pid:|Worker PID:) (\d{1,10})\b")
_ACTOR_IP = re.compile(r"(?:^\s+ip:|Worker IP address:) ([\w.:-]{2,60})")
_DEVICE = re.compile(r"(?:^|\s)(?:CA '|Infiniband device '|hca_id:\s*)([\w-]{2,40})")
_ADDRESS = re.compile(r"\b(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d\b")
_USAGE = re.compile(r"^[\w./-]{1,120}: error: (\S.{3,400})")
_LAUNCHED = re.compile(r"launched up to operation (\d{1,18})")
_RAS_RANK = re.compile(r"^\s*Rank (\d{1,6}) -- ")
_RAS_PROCESS = re.compile(r"^\s*Process (\d{1,10}) on node \S+ managing GPU")
_NORM = re.compile(r"^\s*rank\s+(\d{1,6}) = (\S+)$")
_STALLED = re.compile(r"^(\d{1,6})!?: \[")
_STALLED_OPERATION = re.compile(r"\[missing ranks: ([\d, ]+)\]")
_STALLED_READY = re.compile(r"(\S{0,200}) ?\[ready ranks: (\d[\d, ]*)\]")
_CULPRIT = re.compile(r"Culprit rank (\d{1,6}); Error type: (\w+)")
_TASK = re.compile(r"^\s*/job:\w+/replica:\d+/task:(\d{1,6})\b")
_KEY = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)$")


def read_usage(text: str) -> dict[str, Any] | None:
    """Read the error that argparse prints for an invalid command line; None for another program's line."""
    found = _USAGE.match(text)
    return {"type": "ArgumentError", "message": found[1], "traceback": ""} if found else None


def read_frames(lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read the library of the innermost frame of a native stack, as Open MPI prints it; system libraries are
    skipped.
    """
    found = (match for _, line in islice(lines, FRAMES) if (match := _FRAME.match(line)))
    first = next((match for match in found if not _OF_SYSTEM.search(match["path"])), None)
    if first is None:
        return {}
    library = first["path"].rpartition("/")[2]
    return {"library": library, "symbol": first["symbol"]} if first["symbol"] else {"library": library}


def read_lost_bus(text: str, lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any] | None:
    """Read the address of a GPU that the driver's next lines report as off the bus; None if they do not."""
    address = _ADDRESS.search(text)
    for place, (_, line) in enumerate(lines):
        if place >= BUS_LINES:
            break
        if address and "fallen off the bus" in line:
            return {"bus": address[0]}
    return None


def read_port(text: str, lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any] | None:
    """Read a port that is down from the block of an InfiniBand device, as ibstat, ibstatus and ibv_devinfo print it;
    None if no port is down. A disabled Ethernet port is ignored, since it is not in use.
    """
    head = _DEVICE.search(text)
    device = head[1] if head else ""
    found: dict[str, Any] | None = None
    for place, (_, line) in enumerate(lines):
        key, colon, value = line.strip().partition(":")
        value = value.strip().rpartition(": ")[2]
        if place >= PORT_LINES or not device or _DEVICE.search(line) or not colon:
            break
        if key.lower() == "state":
            if found is None and value.lower().removeprefix("port_").startswith("down"):
                found = {"interface": device, "text": "down"}
        elif key.lower() in ("physical state", "phys state") and found and found["text"] == "down":
            found["text"] = f"down (physical state: {value})"
        elif (
            key.lower() in ("link layer", "link_layer") and found and "thernet" in value and "isabled" in found["text"]
        ):
            found = None
    return found


def read_actor(text: str, lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read which of Ray's processes died: in the raylet's line, or in the list below the exception that reports it."""
    found: dict[str, Any] = {}
    texts = [text]
    for _, line in lines:
        if _ACTOR.match(line) is None or len(texts) > ACTOR_LINES:
            break
        texts.append(line)
    for name, pattern in (("pid", _ACTOR_PID), ("ip", _ACTOR_IP)):
        if match := next(filter(None, map(pattern.search, texts)), None):
            found[name] = int(match[1]) if name == "pid" else match[1]
    if any("process receives a SIGTERM" in line for line in texts):
        found["signal"] = "SIGTERM"
    return found


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
        if raised := RAISED.match(line.strip()):
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
    """Read fairseq's list of gradient norms per rank: all listed ranks, and ranks with a norm that is not finite."""
    norms = [(int(match[1]), match[2]) for _, text in lines if (match := _NORM.match(text))]
    bad = [rank for rank, norm in norms if norm.lower().lstrip("-") in ("nan", "inf")]
    return {"listed": len(norms), "ranks": ", ".join(map(str, bad[:512])), "nonfinite": len(bad)}


def read_stalled(text: str, lines: Iterable[tuple[Prefix, str]]) -> dict[str, Any]:
    """Read the ranks that Horovod's stall inspector lists as missing: `3: [allreduce.x]`, or `[missing ranks: 3]`.

    Up to version 0.15 it lists in the line itself, for each tensor, the `ready` ranks that wait for the others.
    """
    if ready := _STALLED_READY.findall(text):
        return _ready({tensor: set(ranks.replace(" ", "").split(",")) for tensor, ranks in ready[:512]})
    found: list[str] = []
    awaited: dict[str, str] = {}
    for place, (prefix, text) in enumerate(lines):
        if prefix.task is not None and text.startswith("["):  # the rank at the line's start was read as srun's task
            found.append(str(prefix.task))
            awaited[found[-1]] = text.strip(" []\r\n")
        elif rank := _STALLED.match(text.strip()):
            found.append(rank[1])
            awaited[rank[1]] = text.partition("[")[2].strip(" []\r\n")
        elif operation := _STALLED_OPERATION.search(text):
            found += operation[1].replace(" ", "").split(",")
        elif found or place > 2:
            break
    return {"ranks": ", ".join(dict.fromkeys(found[:512])), **_apart(awaited)}


def _ready(waiting: Mapping[str, set[str]]) -> dict[str, Any]:
    """{"ready": "0, 1"}: the ranks that wait, if a lower rank waits for no tensor or all wait for the same ones.
    Otherwise `ranks` are those that wait only for some tensors. If no rank waits for all of them, the ranks wait for
    each other, and `apart` names a tensor that a rank lacks.
    """
    every = sorted(set().union(*waiting.values()), key=int)
    ready = set.intersection(*waiting.values())
    if len(every) <= int(every[-1]) or len(ready) == len(every):
        return {"ready": ", ".join(every)}
    lacks = {rank: next(name for name, ranks in waiting.items() if rank not in ranks)
             for rank in every if rank not in ready}  # fmt: skip
    if ready:
        return {"ready": ", ".join(sorted(ready, key=int)), "ranks": ", ".join(lacks)}
    first_by_name = {name: rank for rank, name in reversed(lacks.items())}
    apart = "; ".join(
        f"{rank}: {name[:80]}" for name, rank in sorted(first_by_name.items(), key=lambda one: int(one[1]))
    )
    return {"ranks": ", ".join(every), "apart": apart}


def _apart(awaited: Mapping[str, str]) -> dict[str, Any]:
    """{"apart": "0: a; 1: b"} if each tensor is missing from one rank only: the ranks wait for each other."""
    lacks = {rank: set(names.removesuffix(" ...").split(", ")) for rank, names in awaited.items()}
    every = [name for names in lacks.values() for name in names]
    if len(lacks) < 2 or len(set(every)) < len(every):
        return {}
    return {"apart": "; ".join(f"{rank}: {names.partition(', ')[0][:80]}" for rank, names in [*awaited.items()][:4])}


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


READERS_OF_BLOCK: dict[str, Callable[[Iterator[tuple[Prefix, str]]], dict[str, Any] | None]] = {
    "elastic": read_failure, "ras": read_ras, "norms": read_norms, "others": read_others, "tasks": read_tasks,
}  # fmt: skip
"""Readers of blocks that have no fields in their first line. They get the lines below it."""
READERS_OF_LINE_AND_BLOCK: dict[str, Callable[[str, Iterator[tuple[Prefix, str]]], dict[str, Any] | None]] = {
    "stalled": read_stalled, "actor": read_actor, "bus": read_lost_bus, "port": read_port,
}  # fmt: skip
READERS_OF_LINE: dict[str, Callable[[str], dict[str, Any] | None]] = {"usage": read_usage, "culprits": read_culprits}
