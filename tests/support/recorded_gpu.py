"""Runs recorded on a real GPU (tests/recorded/gpu/README.md), unpacked for tests.

folder = gpu_recording("none")            # shared and read-only: run/, log, traces and marks where there are any
run = copy_gpu_run("stuck", tmp_path)     # a run folder of the test, which it may analyze and change
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tarfile
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_ARCHIVES = _ROOT / "tests" / "recorded" / "gpu"
_UNPACKED = _ROOT / "build" / "recorded-gpu"

NAMES = tuple(sorted(path.name.removesuffix(".tar.xz") for path in _ARCHIVES.glob("*.tar.xz")))


def gpu_recording(name: str) -> Path:
    """Folder of the recording, unpacked at most once for each version of its archive; do not write into it."""
    archive = _ARCHIVES / f"{name}.tar.xz"
    version = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    target = _UNPACKED / f"{name}-{version}"
    _UNPACKED.mkdir(parents=True, exist_ok=True)
    with (_UNPACKED / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Several test processes share the folder.
        if not target.is_dir():
            partial = target.with_name(f"{target.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            with tarfile.open(archive) as opened:
                opened.extractall(partial, filter="data")
            partial.rename(target)
    return target / name


def copy_gpu_run(name: str, into: Path) -> Path:
    """Copy of the recording's run folder, `into/NAME`."""
    return shutil.copytree(gpu_recording(name) / "run", into / name)
