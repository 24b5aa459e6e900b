"""Importing this module claims the short names of Rankscope's packages; import it before `rankscope.analyzers`.

import rankscope.claim
"""

from __future__ import annotations

import sys
from pathlib import Path

from rankscope.import_names import FOLDER, PACKAGES, claim_names

__all__: list[str] = []

for _name in PACKAGES:
    _module = sys.modules.get(_name)
    _file = getattr(_module, "__file__", None)
    if _module is not None and not (_file and Path(_file).is_relative_to(FOLDER)):
        raise ImportError(f"this process has its own module {_name!r}: use rankscope.open in another process")
claim_names()
