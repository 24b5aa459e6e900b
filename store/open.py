"""Classify a path or address given by a user: run, folder of runs, address, shared run, or other files.

    found = classify(Path("runs"))
    found.kind, found.run, found.run_ids     # "runs", runs/demo-2, ("demo-2", "demo-1"), newest first

Only the start of a file is read, and an address is not opened.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from probes.tape.files.safe_open import open_plain
from probes.tape.rundir import RunDir
from store.published.address import address_of
from store.readers.untrusted.archives import PlainMember
from store.runs_folder import RunsFolder

__all__ = ["SHARED_MARK", "Found", "Kind", "classify", "is_shared"]

Kind = Literal["address", "run", "runs", "shared", "files", "missing"]
"""shared: a file that `rankscope share` wrote. files: an existing file or folder without a run."""
SHARED_MARK = "shared.json"
"""Name of the first file in an archive that `rankscope share` wrote."""
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a path or address refers to."""

    path: Path
    kind: Kind
    address: str = ""
    run_ids: tuple[str, ...] = ()
    """Runs of a folder, newest first."""

    @property
    def run(self) -> Path:
        """The folder of the run. If the path holds several runs, the folder of the newest one; for anything else, the
        path itself."""
        return self.path / self.run_ids[0] if self.run_ids else self.path


def classify(path: Path) -> Found:
    """Classify a path typed by a user; in an address, `//` may have become `/`."""
    if address := address_of(path):
        return Found(path=path, kind="address", address=address)
    if not path.exists():
        return Found(path=path, kind="missing")
    if RunDir.is_run(path):
        return Found(path=path, kind="run")
    if path.is_dir():
        run_ids = tuple(RunsFolder(path).run_ids())
        return Found(path=path, kind="runs" if run_ids else "files", run_ids=run_ids)
    return Found(path=path, kind="shared" if is_shared(path) else "files")


def is_shared(path: Path) -> bool:
    """Return True for a file that `rankscope share` wrote, whatever its name is."""
    try:
        if not path.is_file():
            return False
        with open(open_plain(path), "rb") as file:
            if file.read(2) != _GZIP:
                return False
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r|gz", tarinfo=PlainMember) as archive:
                first = archive.next()
    except (OSError, EOFError, ValueError, tarfile.TarError):
        return False
    return first is not None and first.isreg() and Path(first.name).name == SHARED_MARK and first.name.count("/") == 1
