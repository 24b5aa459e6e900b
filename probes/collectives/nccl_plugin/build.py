"""Build the NCCL profiler plugin with the machine's C compiler, once, into a cache.

python -m rankscope.probes.collectives.nccl_plugin.build          # build now, print the path

A wheel contains the C sources but no binary, so that it installs everywhere, even without a compiler. The library is
compiled on first use (two seconds), and cached under a name derived from the sources, the flags and the machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["OVERRIDE", "BuildError", "compile_plugin", "library"]

SOURCES = ("tape.c", "names.c", "recorder.c", "links.c", "versions.c")
FLAGS = ("-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread")
# nodelete: NCCL closes its plugin with the last communicator, while the plugin's thread may still be inside.
LINK_FLAGS = ("-shared", "-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now")
OVERRIDE = "RANKSCOPE_NCCL_PLUGIN"
TIMEOUT_S = 120.0
_HERE = Path(__file__).resolve().parent


class BuildError(RuntimeError):
    """The plugin cannot be built here; the text is one line that says why."""


def library() -> Path:
    """Path of the plugin's shared object: the one named by RANKSCOPE_NCCL_PLUGIN, or Rankscope's, built if necessary.

    Raises BuildError.
    """
    named = os.environ.get(OVERRIDE, "")
    if named:
        if not Path(named).is_file():
            raise BuildError(f"{OVERRIDE} names {named}, which is not a file")
        return Path(named).resolve()
    if not sys.platform.startswith("linux") or sys.byteorder != "little":
        raise BuildError("the plugin is for little-endian Linux")
    path = _cache_folder() / f"libnccl-profiler-rankscope-{_fingerprint()}.so"
    if not path.is_file():
        compile_plugin(path)
    # a library in this folder is loaded into the process, so the folder must be private
    for entry in (path.parent, path):
        facts = entry.stat()
        if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & 0o022:
            raise BuildError(f"{entry} belongs to another user or can be written by others")
    return path


def compile_plugin(target: Path, *, flags: Sequence[str] = (), sources: Sequence[Path] = ()) -> None:
    """Compile the plugin to `target`, which appears complete or not at all. Raises BuildError.

    `flags` follow the plugin's own flags; `sources` are compiled into the same library.
    """
    compiler = _compiler()
    if compiler is None:
        raise BuildError("no C compiler (cc, gcc or clang) is on the path")
    fresh = ""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, fresh = tempfile.mkstemp(dir=target.parent, prefix=".build-", suffix=".so")
        os.close(handle)
        words = [compiler, *FLAGS, *LINK_FLAGS, *flags, *(str(_HERE / name) for name in SOURCES), *map(str, sources)]
        done = subprocess.run([*words, "-o", fresh], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise BuildError(f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}")
        os.chmod(fresh, 0o755)
        os.replace(fresh, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot build {target}: {error}") from None
    finally:
        if fresh and os.path.exists(fresh):
            os.unlink(fresh)


def _compiler() -> str | None:
    named = os.environ.get("CC", "").split()
    return next((found for word in (*named[:1], "cc", "gcc", "clang") if (found := shutil.which(word))), None)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "rankscope"


def _fingerprint() -> str:
    digest = hashlib.sha256("\0".join((*FLAGS, *LINK_FLAGS, platform.machine(), *platform.libc_ver())).encode())
    for path in sorted((*_HERE.glob("*.c"), *_HERE.glob("*.h"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{library()}\n")
    except BuildError as problem:
        sys.exit(f"rankscope: the NCCL plugin cannot be built: {problem}")
