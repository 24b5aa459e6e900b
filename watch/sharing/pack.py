"""Pack a run into one file for another engineer: store, reports, stacks and logs, without secrets.

    packed = pack(RunDir.open(path), Path("demo.rankscope.tar.gz"), version="0.1.0")
    packed.verdict, packed.num_bytes

1. Bring the store of each node up to date from the tapes, and copy it with redacted texts (`redacted_store`).
2. Redact and copy `run.json`, stacks and the ends of logs. Checkpoints, data and tapes are not packed.
3. Diagnose the copy, and write the reports from that diagnosis, so that the recipient gets the same verdict.

The file is a tar.gz of one folder. After unpacking, every command opens it as a run; `rankscope analyze` and
`shared_run` also read the packed file.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analyzers.diagnose import Diagnosis
from analyzers.report.files import ReportError, write_reports
from probes.tape.files.safe_open import open_plain
from probes.tape.redaction.secrets import Redactor
from probes.tape.rundir import RunDir
from store import StoreError, is_watched
from store.catch_up import stores_up_to_date
from store.collect import plain_files
from store.database import WAIT_S
from store.open import SHARED_MARK
from watch.sharing.redacted_store import copy_store
from watch.sharing.shared_run import diagnosed_folder
from watch.verdicts.run_phase import settled_phase

__all__ = ["TAIL_BYTES", "Packed", "pack", "printable_name"]

TEXT_FOLDERS = ("stacks", "logs")
TAIL_BYTES = 8 << 20
"""Bytes kept from the end of each stack or log file."""
MAX_TEXTS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The written file and its contents."""

    path: Path
    num_bytes: int
    diagnosis: Diagnosis
    num_texts: int
    """Number of stack and log files."""
    left_out: tuple[str, ...] = ()


def pack(run: RunDir, target: Path, *, version: str, last_steps: int | None = None) -> Packed:
    """Write the file. `last_steps`: include rows of the newest steps only; the reports still cover all steps.

    Raises StoreError if the run cannot be read, and ReportError if the file cannot be written.
    """
    phase = settled_phase(run)
    is_live = phase.word in ("running", "ending") or (phase.word == "unknown" and is_watched(run.stores()))
    manifest = run.manifest()
    redactor = Redactor.of(run.private_manifest())
    with _errors_of(target), TemporaryDirectory(prefix="rankscope-") as scratch:
        folder = RunDir(Path(scratch) / printable_name(run))
        folder.reports.mkdir(parents=True)
        facts: dict[str, Any] = {
            "rankscope_version": version, "packed_wall_ns": time.time_ns(), "is_live": is_live, "first_step": None,
        }  # fmt: skip
        _copy_stores(run, folder, redactor)
        if manifest:
            folder.write_manifest(redactor.within(manifest))
        texts, left_out = _copy_texts(run, folder, redactor)
        (folder.path / SHARED_MARK).write_text(json.dumps(facts, indent=2))
        with diagnosed_folder(folder) as (store, diagnosis):
            _write_reports(store, diagnosis, folder, version)
        if last_steps is not None and isinstance(newest := diagnosis.run.get("steps"), int):
            facts["first_step"] = max(0, newest - last_steps + 1)
            _cut(folder, facts["first_step"])
            (folder.path / SHARED_MARK).write_text(json.dumps(facts, indent=2))
        num_bytes = _archive(folder.path, target)
    return Packed(
        path=target, num_bytes=num_bytes, diagnosis=diagnosis, num_texts=texts, left_out=tuple(left_out)
    )  # fmt: skip


def printable_name(run: RunDir) -> str:
    """Name of the run, without characters that a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "-" for letter in run.run_id)


def _copy_stores(run: RunDir, folder: RunDir, redactor: Redactor) -> None:
    with ExitStack() as opened:
        paths = stores_up_to_date(run, opened, WAIT_S, include_newest=True)
        if not paths:
            raise StoreError(f"{run.path} has no records yet: there is nothing to share")
        for path in paths:
            copy_store(path, folder.path / path.name, redactor)


def _cut(folder: RunDir, first_step: int) -> None:
    """Replace the stores with copies that lack earlier steps. The texts in the stores are already redacted."""
    for path in folder.stores():
        whole = path.with_name(f"whole-{path.name}")
        path.replace(whole)
        copy_store(whole, path, lambda text: text, first_step=first_step)
        whole.unlink()


def _copy_texts(run: RunDir, folder: RunDir, redactor: Redactor) -> tuple[int, list[str]]:
    """Copy stacks and logs. Returns their number and what was left out."""
    num = 0
    left_out: list[str] = []
    for name in plain_files(run, TEXT_FOLDERS, left_out):
        if num >= MAX_TEXTS:
            left_out.append(f"more than {MAX_TEXTS:,} files of stacks and logs")
            break
        with open(open_plain(run.path / name), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", "replace")
        if text:
            copy = folder.path / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(redactor(text), encoding="utf-8")
            num += 1
    return num, left_out


def _write_reports(store: Any, diagnosis: Diagnosis, folder: RunDir, version: str) -> None:
    from analyzers.report.json import to_json

    reports = folder.reports
    write_reports(
        store, diagnosis, folder.manifest(), html=reports / "report.html", markdown=reports / "report.md",
        version=version,
    )  # fmt: skip
    (reports / "report.json").write_text(json.dumps(to_json(diagnosis), indent=2), encoding="utf-8")


def _archive(folder: Path, target: Path) -> int:
    """Write the tar.gz, readable by its owner only, with the file `SHARED_MARK` as the first member."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]
    paths.sort(key=lambda path: (path.name != SHARED_MARK, path))
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as into:
            for path in paths:
                into.add(path, f"{folder.name}/{path.relative_to(folder).as_posix()}", filter=_anonymous)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return target.stat().st_size


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove user and group names from a tar member, and allow access for the owner only."""
    member.uname = member.gname = ""
    member.uid = member.gid = 0
    member.mode = 0o600
    return member


@contextlib.contextmanager
def _errors_of(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"{target}: cannot be written ({error.strerror or error}): choose another place") from error
