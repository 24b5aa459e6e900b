"""What a folder that is no run of ours holds: flight-recorder dumps, profiler traces, or neither.

    holding = recognise(Path("dumps"))
    holding.kind        # "flight_recorder" or "kineto"
    holding.found       # its files, and what was left alone

Files are told by what they begin with, not by their names: everybody names dumps as he likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from analyzers.diagnose import Diagnosis
from analyzers.external.dump_diagnosis import diagnose_dumps
from analyzers.external.trace_diagnosis import diagnose_traces
from analyzers.printable import visible
from store.readers.external_files import SourceError, Survey, head, survey

__all__ = ["Holding", "SourceError", "diagnose_foreign", "recognise"]

Kind = Literal["flight_recorder", "kineto"]
_TRACE_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"baseTimeNanoseconds"')
_DUMP_KEYS = (b"pg_config", b"comm_lib_version", b"nccl_version", b"entries", b"pg_status", b"record_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One kind of input and its files."""

    kind: Kind
    found: Survey


def recognise(path: Path) -> Holding:
    """Look at the beginning of every file. Raises SourceError with one line if none is of a kind that is read."""
    if not path.exists():
        raise SourceError(f"no such file or folder: {path}")
    looked = survey(path)
    kinds: dict[Kind, list[Path]] = {"flight_recorder": [], "kineto": []}
    other = 0
    for file in looked.paths:
        try:
            kind = _kind(head(file))
        except SourceError as error:
            looked.tell(file, str(error))
            continue
        if kind is None:
            other += 1
        else:
            kinds[kind].append(file)
    dumps, traces = kinds["flight_recorder"], kinds["kineto"]
    if not dumps and not traces:
        shown, unread = visible(str(path)), ""
        if looked.problems:
            unread = visible(f" ({looked.problems[0]['path']} {looked.problems[0]['problem']})")
        if not path.is_dir():
            raise SourceError(f"{shown} is not a run's folder, no flight-recorder dump and no profiler trace{unread}")
        raise SourceError(
            f"{shown} holds no run (run.json, tapes/), no flight-recorder dumps and no profiler traces{unread}"
        )
    if dumps and traces:
        looked.tell(traces[0], f"is a profiler trace, one of {len(traces)}: analyze them in a folder of their own")
    if other:
        looked.problems = looked.problems[:49]
        looked.tell(path, f"{other} file{'s' * (other != 1)} of other kinds left unread")
    return Holding(kind="flight_recorder" if dumps else "kineto",
                   found=Survey(paths=dumps or traces, problems=looked.problems))  # fmt: skip


def _kind(first: bytes) -> Kind | None:
    text = first.lstrip()
    if text[:1] == b"{":
        if any(key in first for key in _TRACE_KEYS):
            return "kineto"
        return "flight_recorder" if any(b'"' + key + b'"' in first for key in _DUMP_KEYS) else None
    if first[:1] == b"\x80" and any(key in first for key in _DUMP_KEYS):
        return "flight_recorder"
    return None


def diagnose_foreign(path: Path) -> Diagnosis:
    """The diagnosis of a folder that is no run of ours. Raises SourceError with one line if nothing in it is read."""
    holding = recognise(path)
    name = path.name or str(path)
    if holding.kind == "kineto":
        return diagnose_traces(holding.found, name=name)
    return diagnose_dumps(holding.found, name=name)
