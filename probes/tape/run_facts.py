"""Facts of a run that only a rank knows: versions, settings of libraries, the device, and the exception that ended it.

recorder.event(event_kinds.EXCEPTION, **exception_fields(error))
run.add_to_manifest({"versions": versions()} | device_name())
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .redaction.secrets import Redactor

__all__ = [
    "device_name",
    "exception_fields",
    "note_module",
    "package_of_program",
    "settings",
    "source_commit",
    "versions",
]

_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MAX_BYTES = 1 << 22
"""Maximum size of `packed-refs`, which has a line per branch and tag."""

_PREFIXES = (
    "NCCL_", "TORCH_NCCL_", "RCCL_", "GLOO_", "FI_", "UCX_", "OFI_", "RDMAV_", "CUDA_", "PYTORCH_", "TORCHINDUCTOR_",
)  # fmt: skip
_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX", "LD_PRELOAD")
_DIFFERS_BY_RANK = {
    "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}  # fmt: skip
"""Variables that normally differ between ranks or runs."""
MAX_VALUE_CHARS = 200


def versions() -> dict[str, str]:
    """Versions of Python, torch, rankscope and NVIDIA's driver where installed, and the working directory's commit."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["rankscope"] = importlib.metadata.version("rankscope")
    with contextlib.suppress(OSError, IndexError):
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        if number := re.search(r"\d+\.\d+(\.\d+)?", line):
            found["gpu driver"] = number[0]
    with contextlib.suppress(OSError):  # the working directory was deleted
        if commit := source_commit(Path.cwd()):
            found["commit"] = commit
    return found


def settings(more: Iterable[str] = ()) -> dict[str, str]:
    """Settings of the communication libraries and of torch, and the variables in `more`; secrets redacted."""
    wanted = {*_NAMES, *more, *(name for name in os.environ if name.startswith(_PREFIXES))} - _DIFFERS_BY_RANK
    redactor = Redactor.of({})
    found = {}
    for name in sorted(wanted & set(os.environ)):
        text = redactor(f"{name}={os.environ[name][:MAX_VALUE_CHARS]}")
        found[name] = text.partition("=")[2]
    return found


def device_name() -> dict[str, str]:
    """`device_name` of the GPU, and torch's `float32_matmul_precision`, on which the GPU's peak FLOPS depends. Empty
    without a GPU."""
    if not torch.cuda.is_available():
        return {}
    facts = {"device_name": torch.cuda.get_device_name()}
    with contextlib.suppress(RuntimeError):  # torch raises if its newer settings were used as well
        facts["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return facts


_module = ""


def note_module(name: str) -> None:
    """Remember that the program is this module, run with `-m`, because `__main__` may be another module when it
    fails."""
    global _module
    _module = name


def package_of_program() -> str:
    """Folder of the top-level package of a program that was run as a module; empty for a script. The script's frames
    count as the user's code, even if the script is installed like a package.
    """
    with contextlib.suppress(Exception):
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        top = (_module or (spec.name if spec is not None else "")).partition(".")[0]
        found = sys.modules.get(top) or (importlib.util.find_spec(top) if top else None)
        places = getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None)
        return "" if top == "rankscope" or not places else str(next(iter(places)))
    return ""


def exception_fields(error: BaseException) -> dict[str, Any]:
    """Return the fields of an `exception` event."""
    return {
        "type": type(error).__name__,
        "message": str(error)[:4000],
        "traceback": "".join(traceback.format_exception(error))[-20_000:],
        "package": package_of_program(),
    }


def source_commit(place: Path) -> str:
    """Hash of HEAD of the checkout that holds `place`; empty if there is none, or it cannot be read."""
    try:
        for folder in (place, *place.parents):
            if (folder / ".git").exists():
                return _head(folder / ".git")
    except (OSError, ValueError):
        pass
    return ""


def _head(git: Path) -> str:
    """HEAD of a repository; in a linked worktree `.git` is a file with the folder's path."""
    if git.is_file():
        git = git.parent / _text(git).removeprefix("gitdir:").strip()
    head = _text(git / "HEAD")
    if not head.startswith("ref:"):
        return head if _HASH.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    common = git / _text(git / "commondir") if (git / "commondir").exists() else git
    for folder in (git, common):
        if (folder / name).is_file():
            found = _text(folder / name)
            return found if _HASH.fullmatch(found) else ""
    for line in _text(common / "packed-refs").splitlines() if (common / "packed-refs").exists() else ():
        found, _, packed = line.partition(" ")
        if packed == name and _HASH.fullmatch(found):
            return found
    return ""


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_BYTES).strip()
