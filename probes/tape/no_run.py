"""Error texts for a path that is not a run: what it is, and what to do instead.

no_run_at(path)              # "no run at runs/demo-9: see `ls runs`"
f"{path} {what_instead(path, runs_in_it)}"
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NAME_ONE", "no_folder", "no_run_at", "what_instead"]

NAME_ONE = "name a run's folder, for example runs/latest"
_READ_BY = "an address is read by `rankscope analyze` and `rankscope dashboard`"
_FORM = "an address is s3://bucket/prefix or file:///folder"
_MADE = "it is made by the first `rankscope train` or `rankscope run`"


def no_folder(runs: Path) -> str:
    """Full message for a missing folder of runs, which is normal before the first run."""
    if address := _address(runs):
        return f"no folder {address}: {_how_read(address)}; name the folder that holds the runs"
    if runs.exists():
        return f"{runs} is a file: name the folder that holds the runs"
    made = f" ({_MADE})" if runs.name == "runs" else ""
    return f"no folder {runs}{made}: name the folder that holds the runs"


def no_run_at(missing: Path, but: str = "") -> str:
    """Full message for a path that does not exist, or for an address (a Path turns its `//` into `/`). `but`: what else
    was looked for.
    """
    if address := _address(missing):
        return f"no run at {address}: {_how_read(address)}"
    return f"no run at {missing}{but}: {_where_else(missing)}"


def _how_read(address: str) -> str:
    is_known = re.fullmatch(r"(s3://|file:///)[^/].*", address, re.DOTALL)
    return _READ_BY if is_known else _FORM


def _address(path: Path) -> str:
    """The address that was typed for a path, which lacks one of its slashes; empty if it is none."""
    parts = re.fullmatch(r"(\w{2,}):(?:/(.*))?", str(path), re.DOTALL)
    if parts is None:
        return ""
    return f"{parts[1]}://{'/' * (parts[1] == 'file')}{(parts[2] or '').lstrip('/')}"


def _where_else(missing: Path) -> str:
    """Suggest where the runs are: next to `missing`, if the folder that contains it exists. Otherwise name the missing
    folder."""
    if missing.name == "latest":
        return _MADE
    folder = missing.parent
    if not missing.is_absolute() and (inside := Path("runs") / missing).is_dir():
        return f"did you mean {inside}?"
    if folder == Path() and Path("runs").is_dir():
        return "see `ls runs`"
    return f"see `ls {folder}`" if folder.is_dir() else f"there is no folder {folder} either"


def what_instead(folder: Path, runs: Sequence[Path]) -> str:
    """Describe the content of a folder that is not a run: `runs` (and name one of them), or no run at all."""
    if not runs:
        return f"holds no run (no run.json, no tapes/, no telemetry.duckdb): {NAME_ONE}"
    one = folder / "latest" if folder / "latest" in runs else max(runs)
    return f"is a folder of runs: name one of them, for example {one}"
