"""Files that somebody made to harm or to mislead: each writes itself into a folder.

`DUMPS` and `TRACES` are {name: (writer, words that the report must say)}; nothing in them may run, hang or fill memory.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.store.readers.trace_files import trace
from tests.support.simulator.recorder_dumps import Job

Writer = Callable[[Path], None]
PROOF = "executed"
MARKER = b"pg_config entries "  # what a dump's first bytes are told by


class Bomb:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.folder}/{PROOF}",)


def dump(change: Callable[[dict[str, Any]], Any] = lambda d: None) -> dict[str, Any]:
    """A good dump of rank 0 of two, changed."""
    job = Job(2)
    job.steps(3)
    job.collective("all_reduce", ranks=[0])
    made = job.dump(0)
    change(made)
    return made


def pickled(change: Callable[[dict[str, Any]], Any]) -> Writer:
    return lambda folder: _write(folder, pickle.dumps(dump(change), protocol=2))


def raw(blob: bytes) -> Writer:
    return lambda folder: _write(folder, blob)


def _doubled(times: int) -> list[Any]:
    """A few bytes of a pickle whose text would have 2^times parts."""
    made: list[Any] = ["x"]
    for _ in range(times):
        made = [made, made]
    return made


def entry(name: str, value: Any) -> Writer:
    """Every entry's field `name` is `value`."""

    def change(made: dict[str, Any]) -> None:
        for one in made["entries"]:
            one[name] = value

    return pickled(change)


def _write(folder: Path, blob: bytes, name: str = "nccl_trace_rank_0") -> None:
    (folder / name).write_bytes(blob)


def _string(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


HEAD = b"\x80\x02" + _string(MARKER)  # a value that stays on the stack: enough to be taken for a dump
CYCLE: dict[str, Any] = {}
CYCLE["pg_config"] = CYCLE


def _bomb(folder: Path) -> None:
    _write(folder, pickle.dumps({"pg_config": {}, "entries": [Bomb(folder)], "version": "2.10"}, protocol=2))


def _json(value: Any) -> Writer:
    return lambda folder: _write(folder, json.dumps(value).encode(), "rank_0.json")


def _link(folder: Path) -> None:
    (folder / "nccl_trace_rank_0").symlink_to("/etc/hostname")


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "nccl_trace_rank_0")


def _directory(folder: Path) -> None:
    (folder / "nccl_trace_rank_0").mkdir()


def _linked_folder(folder: Path) -> None:
    (folder / "nccl_trace_rank_0").symlink_to("/etc")


def _gzip_bomb(folder: Path) -> None:
    """200 MB of blanks behind a plausible beginning."""
    with gzip.open(folder / "nccl_trace_rank_0.json.gz", "wb", compresslevel=1) as file:
        file.write(b'{"pg_config": ')
        for _ in range(200):
            file.write(b" " * (1 << 20))


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.__setitem__(path, value)


ANY = ""
DUMPS: dict[str, tuple[Writer, str]] = {
    "a class with __reduce__": (_bomb, "nothing was executed"),
    "a global by name": (raw(HEAD + b"0cos\nsystem\n(X\x02\x00\x00\x00idtR."), "numbers, strings and containers"),
    "a global from the stack": (raw(HEAD + b"\x8c\x02os\x8c\x06system\x93."), "nothing was executed"),
    "an instance": (raw(HEAD + b"(cos\nsystem\no."), "nothing was executed"),
    "build": (raw(HEAD + b"}b."), "nothing was executed"),
    "an extension code": (raw(HEAD + b"\x82\x01."), "nothing was executed"),
    "a persistent id": (raw(HEAD + b"Q."), "nothing was executed"),
    "newobj": (raw(HEAD + b")\x81."), "nothing was executed"),
    "bytes": (raw(HEAD + b"C\x02ab."), "operation 0x43"),
    "a string of 2 GB": (raw(HEAD + b"X\xff\xff\xff\x7fabc"), "longer than the file"),
    "a bytearray of 2**62": (raw(HEAD + b"\x96" + struct.pack("<Q", 2**62)), "0x96"),
    "a long of 2 GB": (raw(HEAD + b"\x8b\xff\xff\xff\x7fabc"), "0x8b"),
    "a huge place in the memo": (raw(HEAD + b"r\xff\xff\xff\x7f."), "no flight-recorder dump"),
    "a place that was never filled": (raw(HEAD + b"h\x07."), "is not valid"),
    "a million containers": (raw(HEAD + b"(" + b"]" * 3_100_000), "no dump has so many"),
    "a million marks": (raw(HEAD + b"(" * 3_100_000), "no dump has so many"),
    "nested lists": (raw(HEAD + b"]" * 100_000 + b"a" * 100_000 + b"."), ANY),
    "keys that collide": (raw(HEAD + b"}(" + b"K\x01K\x02" + b"u."), "key that is not text"),
    "no end": (raw(HEAD), "ends early"),
    "a cut dump": (lambda folder: _write(folder, pickle.dumps(dump(), protocol=2)[:-100]), "cut off"),
    "a list": (raw(HEAD + b"."), "no flight-recorder dump"),
    "protocol 0": (raw(b"\x80\x00" + _string(MARKER) + b"."), "protocol 0"),
    "a cycle": (lambda folder: _write(folder, pickle.dumps(CYCLE, protocol=2)), "version ?"),
    "no version": (pickled(lambda made: made.pop("version")), "version ?"),
    "a version that is a list": (pickled(_set("version", [2])), "version ?"),
    "entries that are a number": (pickled(_set("entries", 7)), "not a list"),
    "entries of text": (pickled(_set("entries", ["a", None, 3, []])), "damaged entries"),
    "a configuration of nonsense": (pickled(_set("pg_config", {"0": {"ranks": {"a": 1}}, "1": 7, "2": None})), ANY),
    "ranks beyond all bounds": (
        pickled(_set("pg_config", {"0": {"desc": "default_pg", "ranks": str(list(range(199_990, 200_010)))}})), ANY),
    "a status of nonsense": (pickled(_set("pg_status", {"x": {"last_enqueued_collective": -1}, "0": 3})), ANY),
    "ranks to evaluate": (
        pickled(_set("pg_config", {"0": {"desc": "default_pg", "ranks": "__import__('os').system('id')"}})), ANY),
    "a huge number": (entry("collective_seq_id", 10**300), "damaged entries"),
    "a negative number": (entry("collective_seq_id", -5), "damaged entries"),
    "a number that is true": (entry("collective_seq_id", True), "damaged entries"),
    "no name": (entry("profiling_name", None), "damaged entries"),
    "a name of a list that doubles itself forty times": (entry("profiling_name", _doubled(40)), "damaged entries"),
    "sizes of NaN": (entry("input_sizes", [[float("nan")]]), ANY),
    "sizes beyond memory": (entry("input_sizes", [[2**60] * 16]), ANY),
    "sizes of text": (entry("input_sizes", "8"), ANY),
    "times of infinity": (entry("time_created_ns", float("inf")), ANY),
    "a state of another kind": (entry("state", {"completed": 1}), ANY),
    "frames of nonsense": (entry("frames", [{"name": 3, "line": "x", "filename": ["a"]}, 7, None]), ANY),
    "a group of nonsense": (entry("process_group", {"a": 1}), ANY),
    "a peer beyond the group": (entry("profiling_name", "nccl:send 0->999999"), ANY),
    "an escape in a name": (entry("profiling_name", "nccl:\x1b[2J\x1b]0;owned\x07<script>alert(1)</script>"), ANY),
    "markup in a caller": (entry("frames", [{"name": "[bold red]x[/]", "filename": "/\x1b[31m.py", "line": 1}]), ANY),
    "JSON nested deeply": (
        lambda folder: _write(folder, b'{"pg_config": ' + b"[" * 200_000, "rank_0.json"), "nested too deeply"),
    "JSON of one long string": (
        lambda folder: _write(folder, b'{"pg_config": "' + b"a" * (6 << 20), "rank_0.json"), "is not JSON"),
    "JSON with a number of 5000 digits": (
        lambda folder: _write(folder, b'{"pg_config": ' + b"9" * 5000 + b"}", "rank_0.json"), "not JSON"),
    "JSON that is cut": (lambda folder: _write(folder, json.dumps(dump()).encode()[:-40], "rank_0.json"), "cut off"),
    "JSON with NaN": (_json(dump(_set("entries", [{"collective_seq_id": float("nan")}]))), "damaged entries"),
    "blanks in gzip": (_gzip_bomb, "blanks"),
    "a link": (_link, "is a link: not followed"),
    "a link to a folder": (_linked_folder, "is a link: not followed"),
    "a FIFO": (_fifo, "is not a regular file"),
    "a folder named like a dump": (_directory, "holds no run"),
    "an empty file": (raw(b""), "holds no run"),
    "a name without a rank": (
        lambda folder: _write(folder, pickle.dumps(dump(), protocol=2), "dump"), "no rank in its name"),
    "a rank of 10**12": (
        lambda folder: _write(folder, pickle.dumps(dump(), protocol=2), "rank_1000000000000"), "no rank in its name"),
}  # fmt: skip


def events(*found: Any, **top: Any) -> Writer:
    return lambda folder: _write(folder, json.dumps(top | {"traceEvents": list(found)}).encode(), "r0.pt.trace.json")


def _event(**changes: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10.0, "dur": 2.0} | changes


def _cut_gzip(folder: Path) -> None:
    blob = gzip.compress(json.dumps(trace(0, steps=12)).encode())
    _write(folder, blob[: len(blob) * 2 // 3], "rank0.pt.trace.json.gz")


def _damaged_gzip(folder: Path) -> None:
    blob = bytearray(gzip.compress(json.dumps(trace(0, steps=12)).encode()))
    blob[len(blob) // 2 : len(blob) // 2 + 40] = b"\xff" * 40
    _write(folder, bytes(blob), "rank0.pt.trace.json.gz")


def _twice(folder: Path) -> None:
    for name in ("a_rank0.pt.trace.json", "b_rank0.pt.trace.json"):
        _write(folder, json.dumps(trace(0, steps=3)).encode(), name)


TRACES: dict[str, tuple[Writer, str]] = {
    "no events": (events(), "holds no events"),
    "events of nonsense": (events(None, 3, "x", [], {}), "no operator"),
    "a time that is text": (events(_event(ts="ten"), _event()), "1 damaged events were left out"),
    "a time of NaN": (events(_event(ts=float("nan")), _event()), "1 damaged events were left out"),
    "a duration of infinity": (events(_event(dur=float("inf")), _event()), "1 damaged events were left out"),
    "a negative duration": (events(_event(dur=-1), _event()), "1 damaged events were left out"),
    "a time of 300 digits": (events(_event(ts=10**300), _event()), "1 damaged events were left out"),
    "a name that is a list": (events(_event(name=["a"]), _event()), "1 damaged events were left out"),
    "a step of 10**30": (
        events(_event(cat="user_annotation", name="ProfilerStep#" + "9" * 30), _event()), "ProfilerStep"),
    "a rank that is text": (events(_event(), distributedInfo={"rank": "0"}), ANY),
    "a world of 10**9": (events(_event(), distributedInfo={"rank": 0, "world_size": 10**9}), ANY),
    "groups of nonsense": (events(_event(), distributedInfo={"rank": 0, "pg_config": [3, {"pg_desc": "pp"}]}), ANY),
    "an escape in a name": (
        lambda folder: _write(
            folder, json.dumps({"traceEvents": [_event(), 3]}).encode(), "\x1b[31mrank0<b>.pt.trace.json"), ANY),
    "an array": (lambda folder: _write(folder, b'{"schemaVersion": 1, "traceEvents": 3}', "rank0.json"), "no events"),
    "cut in an event": (
        lambda folder: _write(folder, json.dumps(trace(0, steps=12)).encode()[:-300], "rank0.json"),
        "read up to there"),
    "nested deeply": (
        lambda folder: _write(folder, b'{"traceEvents": [' + b'{"args":' * 100_000, "rank0.json"),
        "nested too deeply"),
    "a gzip that is cut": (_cut_gzip, "cut off"),
    "a gzip that is damaged": (_damaged_gzip, "is damaged"),
    "two traces of a rank": (_twice, "second trace of rank 0"),
}  # fmt: skip
