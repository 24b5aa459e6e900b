"""Rank and host of a log's writer, from its path.

rank_of_log(Path("logs/rank_3.log"))                      # 3
local_rank_of_log(Path("logs/attempt_0/3/stderr.log"))    # 3: torchrun's --log-dir, a number on its node
host_of_log(Path("gpu-07/dmesg.txt"))                     # "gpu-07"
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["host_of_log", "is_of_a_later_node", "local_rank_of_log", "rank_of_log"]

_RANK = re.compile(r"(?<!local_)(?<!local-)(?<!node_)(?<!group_)rank[_\-.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_STREAM = re.compile(r"^(stdout|stderr|error)(\.(log|txt|json))?$")
_LATER_NODE = re.compile(r"(?:^|[_.-])(?:node|worker|noderank|node_rank)[_.-]?0*[1-9]\d{0,5}(?!\d)", re.IGNORECASE)
_PER_HOST = re.compile(
    r"^(?:dmesg|journal(?:ctl)?|kern|messages|syslog|ras|nvidia-smi)(?:[._-](?!(?:log|txt|out|json|gz|zst)\b)(?P<host>[\w.-]+?))?"
    r"(?:\.(?:log|txt|out|json))?(?:\.gz|\.zst)?$"
)


_FOLDER_OF_HOST = re.compile(
    r"(?!(?:job|run|attempt|rank|case|exp|logs?|tmp|test|incident|date|slurm|step|epoch|trial|version|v|data|out)[._-]?\d)"
    r"(?=[\w.-]*\d)[A-Za-z][\w.-]*$",
    re.IGNORECASE,
)
"""A name with a number, as hosts have: `Downloads` is a folder of files from anywhere."""


def rank_of_log(path: Path) -> int | None:
    """The rank that a file's name states: `rank_3.log`."""
    marked = _RANK.findall(path.name)
    return int(marked[-1]) if marked else None


def local_rank_of_log(path: Path) -> int | None:
    """The local rank whose folder torchrun's `--log-dir` made: `attempt_0/3/stderr.log`."""
    parent = path.parent
    if _STREAM.match(path.name) and parent.name.isdecimal() and len(parent.name) < 7:
        return int(parent.name)
    return None


def is_of_a_later_node(path: Path) -> bool:
    """Return True if a file's name counts its node, and it is not the first: `node-2.log`."""
    return _LATER_NODE.search(path.name) is not None


def host_of_log(path: Path) -> str | None:
    """The host of a kernel's log or a tool's output: in its name, or that of its folder."""
    match = _PER_HOST.match(path.name)
    if match is None:
        return None
    folder = path.parent.name
    return match["host"] or (folder if _FOLDER_OF_HOST.match(folder) else None)
