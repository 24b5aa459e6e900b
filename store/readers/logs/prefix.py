"""Parse the prefix of a log line: time, rank, host and process, as launchers and loggers write them.

    prefix = read_prefix("[rank3]:[E501 08:30:00.1 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught", clock)
    prefix.rank, prefix.wall_ns, prefix.stream       # 3, ..., identifies the writer

Known prefixes are those of torchrun (`[rank3]:`, `[default3]:`), srun (`3: `), mpirun (`[1,3]<stderr>:`), horovodrun
(`[3]<stderr>:`), pdsh (`worker-1: `), Ray (`(WorkerDict pid=71, ip=10.0.0.1)`), Kubernetes
(`[pod/job-worker-0/pytorch]`), NCCL (`host:pid:tid [gpu]`), syslog (`Mar 1 08:30:00 host kernel:`), glog and Python's
logging. Any other prefix that a file's lines share is learned (`store.readers.logs.constant_prefix`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from store.readers.logs.timestamps import Clock

__all__ = ["Prefix", "clean", "read_prefix", "start_after_bar"]

MAX_PARTS = 8
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u0080-\u009f\u202a-\u202e\u2066-\u2069]")
_SPACE = re.compile(r"[ \t|]+")
_HOST = r"(?P<host>(?![\d.]+[ :])[A-Za-z0-9][\w.-]{0,62})"
"""A host before its process, not a time: the id of a container may begin with a digit."""
_PARTS = (
    r"(?:> )+",  # quoted in an e-mail or an issue
    r"\[rank(?:: |[ :=])?(?P<rank>\d{1,6})\][: ]?",
    r"\[(?:Rank|RANK) (?P<rank>\d{1,6})\][: ]?",
    r"\[default(?P<local>\d{1,4})\][: ]",
    r"\[(?P<local>\d{1,4})\]:(?=\S|  )",  # Composer's launcher, and torchrun with a template
    r"\[[A-Za-z_]\w{0,31}?(?P<local>\d{1,4})\]:(?=\S|\s)",
    r"\[[EWIF](?:\d{3,4} [\d:.]{8,20})? \S+:\d+\]",
    rf"\[{_HOST}:(?P<pid>\d{{1,10}})\](?= (?:\*\*\* |Signal|Failing at|\[ *\d+\] ))",  # Open MPI
    rf"\[{_HOST}:(?P<pid>\d{{1,10}}) *(?::\d{{1,10}}){{1,2}}\](?= +Caught signal )",  # UCX
    r"\[[\w./-]{1,80}:\d{1,6}(?:, rank[ :=](?P<rank>\d{1,6}))?\](?::(?=\S))?",
    r"\[(?:\d+,)?(?:mpirank:)?(?P<rank>\d{1,6})(?:,[\w.-]{1,64})?\]<std\w{3}>:?",
    r"\[pod/(?P<host>[\w.-]{1,128})/[\w.-]{1,64}\]",
    r"\[ *\d{1,9}\.\d{6}\]",
    r"\[[A-Za-z][\w.-]{0,31}\](?= )",  # a logger, a level
    r"\((?:(?P<actor>[\w.]{1,64}) )?(?:rank=(?P<rank>\d{1,6}) )?pid=(?P<pid>\d{1,10})"
    r"(?:, ip=(?P<host>[\w.:-]{1,64}))?\)",
    r"\((?P<host>head|worker\d{1,4}), rank=\d{1,4}, pid=(?P<pid>\d{1,10})(?:, ip=[\w.:-]{1,64})?\)",  # SkyPilot
    r"Exception in device=[A-Z]{2,4}:(?P<local>\d{1,4}): (?=\S)",
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?=\[|\d\d-\d\d )",
    r"[a-z]\w{0,31} (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \((?=20\d\d-)|\) - (?=\S)",  # submitit
    r"[0-9a-f]{8} (?=\[rank)",
    r"(?P<host>\d{1,3}(?:\.\d{1,3}){3}): (?=\S)",
    r"(?:rank|RANK|Rank)[ =:](?P<rank>\d{1,6})[:,\]]? ",
    rf"{_HOST}:(?P<pid>\d{{1,10}}):\d{{1,10}} \[(?P<gpu>-?\d{{1,3}})\] (?=NCCL|\S+ NCCL|\S+:\d+ )",
    r"(?:(?P<host>[A-Za-z][\w.]{0,40}[-\d][\w.-]{0,40})[ /:]+)?\[?[Rr]ank[_-]?(?P<rank>\d{1,6})\]?: (?= *\S)",
    r"(?P<task>\d{1,6}): (?= *\S)",
    r"(?![A-Z]{1,4}\d{3,6}: )(?!(?i:epoch|step|iter|iteration|batch|layer|block|loss|gpu|cuda|npu|xpu|device|rank|"
    r"phase|stage|trial|"
    r"seed|fold|chunk|part|xid|errno|python|version|run|exp|test|line|top|acc|bleu|bs|lr|fp|bf|int|v)[-_]?[\d.]+: )"
    r"(?![\w.]*\.[A-Z]\w*[a-z]\w*: )"  # not an error of a module with a digit at its end: sqlite3.OperationalError
    r"(?P<host>[A-Za-z][\w.]{0,40}-?\d{1,6}(?:\.[\w.-]{1,60})?): (?= *\S)",
    r"(?P<host>[A-Za-z][\w.-]{0,62}) [\w./()@-]{1,60}\[\d{1,10}\]:",  # syslog and journald
    r"std(?:out|err) [FP](?= )",  # CRI
    r"\d{4}:\d\d:\d\d-\d\d:\d\d:\d\d: ?\( *(?P<pid>\d{1,10})\) (?=\|CCL_)",  # oneCCL
    r"(?P<host>[A-Za-z][\w.-]{0,62}[-_]\d{1,4}) +\|",  # docker compose
    rf"{_HOST} (?=kernel:|systemd|slurm|kubelet)",
    r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?= )",
    r"kernel: ?",
)
_GROUP = re.compile(r"\(\?P<(\w+)>")


def _any_of(parts: Iterable[str]) -> tuple[re.Pattern[str], dict[str, dict[str, str]]]:
    """Join parts into one pattern in which each part is a group. Return the pattern, and the named groups of each part:
    {"part0": {"rank0": "rank"}} if the first part has the group `rank`, which is `rank0` in the pattern."""
    parts = list(parts)
    groups = {f"part{place}": {f"{name}{place}": name for name in _GROUP.findall(part)}
              for place, part in enumerate(parts)}  # fmt: skip
    texts = (_GROUP.sub(rf"(?P<\g<1>{place}>", part) for place, part in enumerate(parts))
    return re.compile("|".join(f"(?P<part{place}>{text})" for place, text in enumerate(texts))), groups


_BRACKETS = _any_of(part for part in _PARTS if part.startswith(r"\["))
_OTHERS = _any_of(part for part in _PARTS if not part.startswith(r"\["))
_AFTER_BAR = re.compile(
    r"(?:\[(?:rank|default)?\d{1,6}\]: ?)?\[[EWIF](?:\d{3,4} [\d:.]{8,20})? \S{1,80}\.cpp:\d{1,6}\]|"
    r"[EF]\d{4} \d\d:\d\d:\d{2,10}\.\d{1,9} +\d+ [\w./-]+\.cc:\d{1,6}\]|"
    r"\[rank\d{1,6}\]: ?(?=Traceback \(most|(?:\w{1,40}\.){0,6}\w{1,40}Error: )"
)
"""Start of a torch log line after a progress bar, which prints no newline."""
_INDENTED = re.compile(r"\[(?:rank|default|Rank|RANK)|\d{1,6}: ")
"""Prefixes with spaces before them: srun aligns its labels."""
_BAR = re.compile(r"[ \t]+\|(?= |$)")
"""Separator that CloudWatch and loguru write between a time and the line."""
_AFTER_TIME = re.compile(
    r" ?:(?= )| -(?= \[(?:[Rr]ank|default|\d{1,6}[],]))| \{(?:\w{1,64}=\"[^\"]{0,200}\",? ?){0,30}\}(?= )"
)
"""Separator between a time and a prefix of the process, as shells write it that stamp the lines of others, and the
labels that Loki's client writes there.
"""
_GLOG_REST = re.compile(r" +\d+ +\S+:\d+\] ?| \S+:\d+\] ?|\] ?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Parts of a line's prefix; None if absent. `task` is srun's number, a rank if srun started one task per rank."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None
    wall_ns: int | None = None
    length: int = 0

    @property
    def stream(self) -> tuple[int | None, int | None, int | None, str | None, int | None]:
        """Identifies the writer: the parts of the prefix that all of its lines share."""
        return (self.rank, self.local_rank, self.task, self.host, self.pid)


def clean(line: bytes) -> str:
    """Make a line safe to show: remove colours, control characters and changes of text direction."""
    text = line.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text if text.isprintable() else _CONTROL.sub("", text)


def read_prefix(text: str, clock: Clock, constant: Sequence[re.Pattern[str]] = ()) -> Prefix:
    """Parse the prefix of a line that `clean` returned; `constant`: further prefixes common to the file's lines."""
    found: dict[str, str] = {}
    wall_ns: int | None = None
    at = 0
    was_torch = False
    for _ in range(MAX_PARTS):
        space = _SPACE.match(text, at)
        if not at and space and not _INDENTED.match(text, space.end()):
            break
        begin = space.end() if space else at
        stamp = clock.read(text[begin : begin + 48]) if wall_ns is None else None
        if stamp is not None:
            wall_ns = stamp.wall_ns
            at = begin + stamp.length
            rest = _GLOG_REST.match(text, at) if text[begin : begin + 2].strip("[")[:1] in "EWIF" else None
            rest = rest or _AFTER_TIME.match(text, at)
            at = rest.end() if rest else at
            continue
        is_bracket = text[begin : begin + 1] == "["
        pattern, groups = _BRACKETS if is_bracket else _OTHERS
        match = pattern.match(text, begin)
        names = groups[match.lastgroup] if match and match.lastgroup else {}
        if match is None and constant:
            match = next((m for one in constant if (m := one.match(text, begin))), None)
            names = {name: name for name in match.re.groupindex} if match else {}
        if match is None or match.end() == at:
            break
        stated = {name: value for group, name in names.items() if (value := match[group]) is not None}
        if "task" in stated and "task" in found:
            break  # a process has one label, so the second number belongs to the message
        is_torch = match[0].startswith("[rank")
        # If a line has two `[rankN]` prefixes of torch, the second is right. NCCL's prefix overrides earlier ones.
        if (is_torch and was_torch) or "gpu" in stated:
            found |= stated
        was_torch |= is_torch
        found = stated | found
        at = match.end()
    if at and (bar := _BAR.match(text, at)):
        at = bar.end()
    return Prefix(
        rank=_number(found, "rank"),
        local_rank=_number(found, "local"),
        task=_number(found, "task"),
        host=found.get("host"),
        pid=_number(found, "pid"),
        gpu=_number(found, "gpu"),
        wall_ns=wall_ns,
        length=at,
    )


def start_after_bar(text: str, at: int) -> int:
    """Index in `text`, from `at` on, where a torch log line follows a progress bar; 0 if there is none."""
    match = _AFTER_BAR.search(text, at) if "[" in text[at:] or ".cc:" in text[at:] else None
    return match.start() if match else 0


def _number(found: dict[str, str], name: str) -> int | None:
    return int(found[name]) if name in found else None
