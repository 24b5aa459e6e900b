"""Environment of a `rankscope preflight` that a test starts, and the lines of its report that do not pass."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in ("GLOO_SOCKET_IFNAME", "RANK")}
    return {**ours, "OMP_NUM_THREADS": "1", "RANKSCOPE_FAIL_LOUD": "1", **more}


def bad(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {line["check"]: line for line in report["lines"] if line["status"] != "pass"}
