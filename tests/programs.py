"""Programs that tests start but Python does not install: Debian's Prometheus, Alertmanager and Slurm.

    @needs("promtool")
    def test_rules() -> None:
        subprocess.run([program("promtool"), "check", "rules", ...])

They are on the path, or in `.programs/`, where `make test` puts them (`tests/fetch_programs.sh`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

__all__ = ["FETCHED", "needs", "program"]

_TEMPLATES = Path("/usr/share/prometheus/alertmanager")
FETCHED = Path(__file__).parent.parent / ".programs" / "usr"
"""Where `tests/fetch_programs.sh` unpacks packages."""


def program(name: str) -> str:
    """Path of the program; empty if it is missing or cannot run."""
    if name == "prometheus-alertmanager" and not _TEMPLATES.is_dir():
        return ""
    return shutil.which(name) or shutil.which(name, path=f"{FETCHED / 'bin'}:{FETCHED / 'sbin'}") or ""


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip where one of them is missing, and say how to get it."""
    missing = [name for name in names if not program(name)]
    how = f"needs {', '.join(missing)}: sh tests/fetch_programs.sh .programs"
    return pytest.mark.skipif(bool(missing), reason=how)
