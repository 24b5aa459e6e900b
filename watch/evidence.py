"""Collect one node's evidence of an incident into an archive that `rankscope analyze` reads.

    collected = collect(Path("evidence.tar.gz"), logs=[Path("job.log")])
    collected.items          # {"dmesg.txt": "", "nvidia-smi.txt": "nvidia-smi is not installed", ...}

Sources: stacks (py-spy), the flight recorder through torch's pipe, NCCL's RAS, the kernel log, nvidia-smi, tails of
logs. Missing sources are listed with the reason, and none is waited for longer than `LIMIT_S`. The job is not
disturbed: a dump requested through the pipe is the same as the watchdog's.

The contents are limited to `MAX_BYTES` in all, and dumps to `DUMPS_SHARE` of that. What does not fit is listed as
missing.

Texts are redacted by pattern (`probes.tape.redaction.secrets`), and only the owner can read the archive. Paths from
other users' processes are not trusted: links are not followed, and only pipes are written to.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from probes.tape.files.safe_open import open_plain
from probes.tape.redaction.printable import visible
from probes.tape.redaction.secrets import Redactor
from watch.stacks.pyspy import StacksError, ranks_here, take_threads
from watch.stacks.recorder_dumps import ask_for_dump, file_state, wait_for_dumps

__all__ = ["Collected", "collect"]

LIMIT_S = 20.0
TAIL_BYTES = 32 << 20
"""Bytes kept from the end of each log."""
DUMP_BYTES = 256 << 20
"""Maximum bytes of a dump. A larger one is left out, since a truncated dump cannot be read."""
MAX_BYTES = 1 << 30
DUMPS_SHARE = 0.75
"""Share of `MAX_BYTES` for dumps. Outputs and logs are added later and get the rest."""
COMMANDS = {
    "dmesg.txt": (("dmesg", "--ctime"), ("journalctl", "--dmesg", "--no-pager", "--since", "-2 days")),
    "nvidia-smi.txt": (("nvidia-smi", "-q"),),
    "ras.txt": (("ncclras", "-v"),),
    "ras.json": (("ncclras", "-f", "json"),),
    "addresses.txt": (("ip", "-br", "addr"),),
    "infiniband.txt": (("ibstat",),),
    "memory.txt": (("free", "-m"),),
    "shared-memory.txt": (("df", "-h", "/dev/shm"),),
    "slurm.txt": (("scontrol", "show", "job", os.environ.get("SLURM_JOB_ID", "")),),
}
"""{file: commands}; the first command that succeeds and prints something is used."""
_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT_DUMP = "/tmp/nccl_trace_rank_"


@dataclass(slots=True)
class Collected:
    """Contents of the archive: {file: empty, or the reason why it is missing}."""

    archive: Path
    items: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    """Size of the contents before compression."""

    @property
    def missing(self) -> dict[str, str]:
        """{file that could not be collected: reason}."""
        return {name: why for name, why in self.items.items() if why}


def collect(
    archive: Path, *, logs: Sequence[Path] = (), pids: Sequence[int] = (), max_bytes: int = MAX_BYTES
) -> Collected:
    """Write the archive, with members below a folder named after the host. Raises OSError if it cannot be written."""
    host = socket.gethostname() or "host"
    collected = Collected(archive)
    chosen = list(pids) or ranks_here()
    fd = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=3) as into:
        writer = _ArchiveWriter(into, collected, host)
        for name, blob, why in _stacks(chosen):
            writer.add(name, blob, why, max_bytes=max_bytes)
        for name, blob, why in _dumps(chosen):
            writer.add(name, blob, why, max_bytes=int(DUMPS_SHARE * max_bytes), is_text=False)
        for name, commands in COMMANDS.items():
            writer.add(name, *_output(commands), max_bytes=max_bytes)
        for path in logs:
            writer.add(f"logs/{visible(path.name)}", *_tail(path), max_bytes=max_bytes)
        about = json.dumps({"host": host, "collected_ns": time.time_ns(), "missing": collected.missing}, indent=2)
        writer.add("collected.txt", about.encode(), "", max_bytes=max_bytes + len(about))
    return collected


@dataclass(frozen=True, slots=True)
class _ArchiveWriter:
    """Adds members to the archive while they fit."""

    into: tarfile.TarFile
    collected: Collected
    host: str

    def add(self, name: str, blob: bytes, why: str, *, max_bytes: int, is_text: bool = True) -> None:
        """Add a member, or note why it is missing. `max_bytes`: limit on all contents including this member."""
        if is_text and not why:
            blob = Redactor()(blob.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if not why and self.collected.num_bytes + len(blob) > max_bytes:
            why = f"{len(blob):,} bytes do not fit below the limit of {max_bytes:,} bytes in all"
        self.collected.items[name] = why
        if why:
            return
        self.collected.num_bytes += len(blob)
        member = tarfile.TarInfo(f"{self.host}/{name}")
        member.size, member.mtime = len(blob), int(time.time())
        self.into.addfile(member, io.BytesIO(blob))


def _output(commands: Sequence[Sequence[str]]) -> tuple[bytes, str]:
    """Return the output of the first command that succeeds and an empty reason. If none succeeds, return nothing and
    the reason."""
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return b"", f"{command[0]}: {type(error).__name__}"
        if done.returncode == 0 and done.stdout:
            return done.stdout[-TAIL_BYTES:], ""
    names = " and ".join(command[0] for command in commands)
    return b"", f"{names}: not installed, or no output"


def _stacks(pids: Sequence[int]) -> Iterator[tuple[str, bytes, str]]:
    """Yield a text with the main threads, and for `rankscope analyze` py-spy's JSON of each process."""
    lines: list[str] = []
    problems: list[str] = [] if pids else ["no process here has a RANK (name the processes with --pid)"]
    has_stack = False
    try:
        for pid in pids:
            stack, threads = take_threads(pid)
            if threads:
                has_stack = True
                yield f"stacks/{stack.name.replace(' ', '-')}.json", json.dumps(threads).encode(), ""
            else:
                problems.append(f"{stack.name}: {stack.problem or 'no stack'}")
            frames = stack.frames or (stack.problem,)
            lines += [f"{stack.name} (pid {stack.pid})", *(f"    {frame}" for frame in frames), ""]
    except StacksError as error:
        problems.append(str(error))
    yield "stacks.txt", "\n".join(lines).encode(), "" if has_stack else "; ".join(problems)


def _dumps(pids: Sequence[int]) -> Iterator[tuple[str, bytes, str]]:
    """Request flight-recorder dumps of this node's ranks through the pipe that torch opens for each rank."""
    asked: dict[str, Path] = {}
    before: dict[Path, tuple[int, int]] = {}
    for pid in pids:
        env = _environment(pid)
        rank, prefix = env.get("RANK", ""), env.get(_PIPE, "")
        if not prefix or not rank.isdecimal():
            continue
        target = Path(next((env[name] for name in _DUMPS if env.get(name)), _DEFAULT_DUMP) + rank)
        state = file_state(target)
        why = ask_for_dump(Path(f"{prefix}{rank}.pipe"))
        if why:
            yield f"nccl_trace_rank_{rank}", b"", why
        else:
            asked[rank], before[target] = target, state
    wait_for_dumps(before, LIMIT_S)
    for rank, target in asked.items():
        blob, why = _tail(target, DUMP_BYTES + 1) if target.exists() else (b"", "")
        if len(blob) > DUMP_BYTES:
            blob, why = b"", f"larger than {DUMP_BYTES:,} bytes"
        yield f"nccl_trace_rank_{rank}", blob, why or ("" if blob else "the rank wrote no dump")


def _environment(pid: int) -> dict[str, str]:
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(pair.decode("utf-8", "replace").split("=", 1) for pair in pairs if b"=" in pair)
    return {}


def _tail(path: Path, limit_bytes: int = TAIL_BYTES) -> tuple[bytes, str]:
    try:
        with open(open_plain(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit_bytes))
            return file.read(limit_bytes), ""
    except OSError as error:
        return b"", str(error.strerror or error)
