"""Versions of torch that attaching was tried with; any other is logged in one line.

warn_if_untried(torch.__version__)
"""

from __future__ import annotations

import logging
import re

__all__ = ["TRIED", "warn_if_untried"]

logger = logging.getLogger("rankscope.probes")
TRIED = ((2, 8), (2, 15))
"""Oldest and newest: docs/compatibility.md says what was run with which."""


def warn_if_untried(version: str) -> bool:
    """Return True, and log a line, for a version outside of those that were tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or TRIED[0] <= (int(found[1]), int(found[2])) <= TRIED[1]:
        return False
    oldest, newest = (".".join(map(str, tried)) for tried in TRIED)
    logger.warning(
        "rankscope is not tested with torch %s (tested: %s to %s); what it cannot hook is not recorded",
        version, oldest, newest,
    )  # fmt: skip
    return True
