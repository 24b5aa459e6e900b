"""Commit of the user's checkout, read from git's files: no process is started.

source_commit(Path.cwd())      # "0d9cb2a6..." or "" outside a checkout
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["source_commit"]

_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MAX_BYTES = 1 << 22
"""Maximum size of `packed-refs`, which has a line per branch and tag."""


def source_commit(place: Path) -> str:
    """Hash of HEAD of the checkout that holds `place`; empty where there is none, or where it cannot be read."""
    try:
        for folder in (place, *place.parents):
            if (folder / ".git").exists():
                return _head(folder / ".git")
    except (OSError, ValueError):
        pass
    return ""


def _head(git: Path) -> str:
    """HEAD of a repository; of a linked worktree `.git` is a file that names the folder."""
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
