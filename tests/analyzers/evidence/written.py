"""A file of a stranger's, and what is found in it."""

from __future__ import annotations

from pathlib import Path

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files

__all__ = ["diagnosed"]


def diagnosed(folder: Path, name: str, content: str | bytes) -> Diagnosis:
    """The diagnosis of one file, written into `folder`."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return diagnose_files([path])
