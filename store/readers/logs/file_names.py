"""Infer a log writer's rank and host from the file's path.

rank_of_log(Path("logs/rank_3.log"))                      # 3
local_rank_of_log(Path("logs/attempt_0/3/stderr.log"))    # 3: torchrun's --log-dir, the local rank
host_of_log(Path("gpu-07/dmesg.txt"))                     # "gpu-07"
host_of_log(Path("incident-17/dmesg.txt"))                # None: the folder may be named for a ticket, a copy etc.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

__all__ = ["host_of_log", "is_of_a_later_node", "local_rank_of_log", "rank_of_log"]

_RANK = re.compile(r"(?<!local_)(?<!local-)(?<!node_)(?<!group_)rank[_\-.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_TASK = re.compile(r"(?P<job>\d+(?:_\d+)?)_(?P<rank>\d{1,6})(?P<rest>_log\.(?:out|err)(?:\.(?:gz|zst|xz|bz2))?)$")
"""Files of submitit's tasks. Each task is a rank, but a single task may have launched several ranks."""
_STREAM = re.compile(r"^(stdout|stderr|error)(\.(log|txt|json))?$")
_LATER_NODE = re.compile(r"(?:^|[_.-])(?:node|worker|noderank|node_rank)[_.-]?0*[1-9]\d{0,5}(?!\d)", re.IGNORECASE)
_PER_HOST = re.compile(
    r"^(?:dmesg|journal(?:ctl)?|kern|messages|syslog|ras|(?:(?:nvidia|npu|rocm|amd)-smi|dcgmi)(?:[._-](?:q|x|ecc|diag|dmon|health|metric))*)"
    r"(?:[._-](?!(?:log|txt|out|json|gz|zst|erst|efi|efi_pstore|ramoops|nvram)\b)(?P<host>[\w.-]+?))?"
    r"(?:\.(?:log|txt|out|json))?(?:\.(?:gz|zst|xz|bz2))?$"
)


_WITH_NUMBER = re.compile(r"(?=[\w.-]*\d)[A-Za-z][\w.-]*$")
_NAMED = re.compile(r"^(?=.*\d)(?=.*[A-Za-z])|(?:node|host|gpu|worker|server)[._-]?[a-z]+$", re.IGNORECASE)
"""A host in a file's name, as opposed to the date or number of a rotated log, or a word (dmesg-after.txt)."""
_NO_HOST = re.compile(
    r"(?:job|run|attempt|rank|case|exp|logs?|tmp|test|incident|ticket|date|slurm|step|epoch|trial|version|v|data|out)"
    r"[._-]?\d",
    re.IGNORECASE,
)
_HOST = re.compile(
    r"(?:[a-z]{1,12}[._-])?(?:(?:gpu|cpu|node|host|worker|compute|server|srv|dgx|hgx|nid|ip|vm|rack|blade|master|login|cn|gn|"
    r"[abhlvt]\d{2,3}[a-z]?x?\d?|gb\d{3}|mi\d{3}x?|p\d[a-z]+|trn\d)[._-]?){1,3}\d[\d_-]*(?:\.[a-z][\w.-]*)?$",
    re.IGNORECASE,
)
"""Names that are certainly hosts: `gpu-07`, `dgx-a100-3`, `ip-10-0-3-7`."""


def rank_of_log(path: Path) -> int | None:
    """The rank that a file's name states: `rank_3.log`; `88123_3_log.err` if submitit's job has several tasks."""
    marked = _RANK.findall(path.name)
    if not marked and (task := _TASK.match(path.name)):
        number = int(task["rank"])
        other = path.with_name(f"{task['job']}_{0 if number else 1}{task['rest']}")
        return number if other.exists() else None
    return int(marked[-1]) if marked else None


def local_rank_of_log(path: Path) -> int | None:
    """The local rank in a folder made by torchrun's `--log-dir`: `attempt_0/3/stderr.log`."""
    parent = path.parent
    if _STREAM.match(path.name) and parent.name.isdecimal() and len(parent.name) < 7:
        return int(parent.name)
    return None


def is_of_a_later_node(path: Path) -> bool:
    """Return True if a file's name has a node number above the first: `node-2.log`."""
    return _LATER_NODE.search(path.name) is not None


def host_of_log(path: Path) -> str | None:
    """The host of a kernel log or a tool's output, from the name of the file or its folder."""
    match = _PER_HOST.match(path.name)
    if match is None:
        return None
    host = match["host"] or ""
    return host if _NAMED.search(host) and not _NO_HOST.match(host) else _host_of_folder(path)


def _host_of_folder(path: Path) -> str | None:
    """The name of a file's folder if it is the name of a host, otherwise None.

    It counts as a host if it looks like one (`gpu-07`), or if a sibling folder whose name differs only in numbers has a
    file of the same name.
    """
    folder = path.parent
    if not _WITH_NUMBER.match(folder.name) or _NO_HOST.match(folder.name):
        return None
    if _HOST.match(folder.name):
        return folder.name
    if folder.parent == Path(tempfile.gettempdir()):
        return None
    shape = re.sub(r"\d+", "#", folder.name)
    same_shape = (other for other in _folders(folder.parent) if re.sub(r"\d+", "#", other.name) == shape)
    return folder.name if any(other != folder and (other / path.name).exists() for other in same_shape) else None


def _folders(parent: Path) -> list[Path]:
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []
