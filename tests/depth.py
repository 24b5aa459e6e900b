"""How much a test tries where more is more of the same: little in each run, all of it at night.

DAMAGES = tried(150, nightly=500)          # nightly: HYPOTHESIS_PROFILE=nightly, as of Hypothesis
"""

from __future__ import annotations

import os

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def tried(usually: int, *, nightly: int) -> int:
    return nightly if NIGHTLY else usually
