"""Appends each finding to the file named by TEAM_PAGER, in place of a team's pager."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["on_finding"]


def on_finding(report: Mapping[str, Any]) -> None:
    """Called by `watch` in a separate process, with the same object that a webhook gets."""
    if "TEAM_PAGER" in os.environ:
        with open(os.environ["TEAM_PAGER"], "a", encoding="utf-8") as file:
            file.write(f"{report['run_id']}: {report['finding']['summary']}\n")
