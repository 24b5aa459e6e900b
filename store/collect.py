"""Merge run folders from the disks of several nodes into one that every reader can open.

    collected = collect([Path("node-0/runs/demo"), Path("node-1/runs/demo")], into=Path("runs/demo"))
    collected.ranks, collected.nodes, collected.num_bytes

A node's folder holds only the tapes of its own ranks and its own `watch`, so no files need to be merged: tapes, events,
stacks and logs are copied. A store is copied unless a `watch` has it open; a reader later ingests missing records from
the tapes. Only regular files are copied, no links. A repeated call copies only what has changed.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.tape.files.safe_open import file_problem, folder_problem, open_plain
from probes.tape.rundir import RunDir, RunError, make_private
from store.database import is_watched, log_of

__all__ = ["Collected", "collect", "plain_files"]

FOLDERS = ("tapes", "stacks", "logs")
MARK = ".collected"
"""Marker file of a folder that `collect` created. `collect` may update only such a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Content of the collected folder. `left_out`: paths that are not regular files or folders."""

    run: RunDir
    nodes: tuple[int, ...]
    ranks: tuple[int, ...]
    num_files: int
    num_bytes: int
    left_out: tuple[str, ...] = ()


def collect(sources: Sequence[Path], into: Path, *, checkpoints: bool = False, force: bool = False) -> Collected:
    """Copy the nodes' folders into one. Raises RunError if two of the folders hold the same node or rank, or (without
    `force`) if the folders belong to different runs.
    """
    runs = [RunDir.open(source) for source in sources]
    _check_same_run(runs, force=force)
    _check_target(into)
    _check_conflicts(runs)
    folders = (*FOLDERS, "checkpoints") if checkpoints else FOLDERS
    left_out: list[str] = []
    num_files = num_bytes = 0
    try:
        if not (into / MARK).exists():
            make_private(into)
            (into / MARK).touch()
        for run in runs:
            for name in _files(run, folders, left_out):
                num_bytes += _copy(run.path / name, into / name)
                num_files += 1
        # The first node's manifest has the launcher's process and the mesh; use another node's only if it has none.
        best = max(runs, key=lambda run: (bool(run.manifest()), run.node_dir(0).is_dir()))
        if manifest := best.manifest():
            RunDir(into).write_manifest(manifest | {"run_id": best.recorded_id()})
    except OSError as error:
        unfinished = f". {into} is incomplete: collect again once this is fixed" if (into / MARK).exists() else ""
        raise RunError(f"{error.filename or into}: cannot be copied: {error.strerror}{unfinished}") from None
    made = RunDir(into.resolve())
    return Collected(
        run=made,
        nodes=tuple(node for node, _ in made.node_dirs()),
        ranks=tuple(sorted({rank for _, rank, _ in made.rank_dirs()})),
        num_files=num_files,
        num_bytes=num_bytes,
        left_out=tuple(left_out),
    )


def _check_same_run(runs: Sequence[RunDir], *, force: bool) -> None:
    ids = {run.recorded_id(): run.path for run in runs}
    if len(ids) > 1 and not force:
        (first, path), (second, other) = list(ids.items())[:2]
        raise RunError(f"{path} is run {first} and {other} is run {second}: if they belong to one job, add --force")


def _check_target(into: Path) -> None:
    if folder_problem(into):
        raise RunError(f"{into} {folder_problem(into)}")
    if into.is_dir() and any(into.iterdir()) and not (into / MARK).exists():
        raise RunError(f"{into} exists and was not created by collect: name a new folder")


def _check_conflicts(runs: Sequence[RunDir]) -> None:
    """Raise RunError if two folders hold the same node, or the same rank of one attempt. Such folders belong to
    different jobs, or one folder was given twice.
    """
    owners: dict[str, Path] = {}
    for run in runs:
        places = [folder for _, _, folder in run.rank_dirs()] + [folder for _, folder in run.node_dirs()]
        for folder in places:
            name = folder.relative_to(run.path).as_posix()
            other = owners.setdefault(name, run.path)
            if other != run.path and not _is_same(other / name, folder):
                raise RunError(
                    f"both {other} and {run.path} have {name} with different content: they are not of one job"
                )


def _is_same(one: Path, other: Path) -> bool:
    names = {path.name for folder in (one, other) for path in folder.iterdir() if path.is_file()}
    matching, _, _ = filecmp.cmpfiles(one, other, names, shallow=False)
    return len(matching) == len(names)


def plain_files(run: RunDir, folders: Sequence[str], left_out: list[str]) -> Iterator[str]:
    """Paths of the regular files in `folders`, relative to the run. Anything else is added to `left_out`."""
    for name in folders:
        if problem := folder_problem(run.path / name):  # os.walk follows the starting folder even if it is a link
            left_out.append(f"{run.path / name} {problem}")
            continue
        for place, inside, files in os.walk(run.path / name):
            linked = [folder for folder in inside if Path(place, folder).is_symlink()]
            inside[:] = sorted(folder for folder in inside if folder not in linked)
            for found in sorted((*files, *linked)):
                path = Path(place, found)
                relative = path.relative_to(run.path).as_posix()
                if not relative.isprintable():
                    left_out.append(f"{run.path / relative} has control characters in its name")
                elif problem := file_problem(path):
                    left_out.append(f"{path} {problem}")
                else:
                    yield relative


def _files(run: RunDir, folders: Sequence[str], left_out: list[str]) -> Iterator[str]:
    """Paths of the regular files to copy unchanged, relative to the run."""
    yield from plain_files(run, folders, left_out)
    for path in (run.path / "run.json", *run.stores()):
        if problem := file_problem(path):
            left_out.append(f"{path} {problem}")
        elif path.suffix == ".duckdb" and not _is_open(path):  # run.json is not copied: `collect` writes a new one
            yield path.name


def _is_open(store: Path) -> bool:
    """Return True if a process is writing the store, or was killed while writing and left its write-ahead log."""
    return is_watched([store]) or log_of(store).exists()


def _copy(source: Path, target: Path) -> int:
    """Copy a file unless the target has its size and modification time. The copy is renamed into place, so no reader
    sees half of it.
    """
    found = source.stat()
    with contextlib.suppress(OSError):
        existing = target.stat()
        if (existing.st_size, existing.st_mtime_ns) == (found.st_size, found.st_mtime_ns):
            return found.st_size
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.collect-{os.getpid()}")
    try:
        _copy_data(source, fresh)
        os.utime(fresh, ns=(found.st_atime_ns, found.st_mtime_ns))
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return found.st_size


def _copy_data(source: Path, target: Path) -> None:
    """Copy a file's data and keep its holes, so that a sparse file takes no more space than its data."""
    target.unlink(missing_ok=True)
    with open(open_plain(source), "rb") as reading:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as writing:
            end = os.fstat(reading.fileno()).st_size
            os.ftruncate(writing.fileno(), end)
            at = 0
            while at < end:
                try:
                    at = os.lseek(reading.fileno(), at, os.SEEK_DATA)
                except OSError:  # ENXIO: the rest of the file is a hole
                    break
                stop = min(end, os.lseek(reading.fileno(), at, os.SEEK_HOLE))
                while at < stop and (data := os.pread(reading.fileno(), min(stop - at, 1 << 20), at)):
                    at += os.pwrite(writing.fileno(), data, at)
                if at < stop:
                    break  # the source was truncated meanwhile
