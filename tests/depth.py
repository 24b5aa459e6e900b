"""How much a test tries where more is more of the same: little in each run, all of it at night and in `make trials`.

DAMAGES = tried(150, nightly=500)          # nightly: HYPOTHESIS_PROFILE=nightly, as of Hypothesis
LAYOUTS = usually({"fsdp": ..., "fsdp x tp": ..., "fsdp x tp, bf16": ...}, later=["fsdp x tp, bf16"])

`later` names what consists of parts that others have, too; `@later("where its parts are")` is for a whole test.
tests/trials/test_depth.py runs all of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TypeVar

import pytest

Case = TypeVar("Case")
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def later(parts: str) -> pytest.MarkDecorator:
    """Leave a test, or one of its parameters, to the night (tests/conftest.py), or to who names it (`file::test`)."""
    return pytest.mark.later(parts)


def tried(usually: int, *, nightly: int) -> int:
    return nightly if NIGHTLY else usually


def usually(cases: Mapping[str, Case], *, later: Collection[str]) -> dict[str, Case]:
    """All of them at night, else without those of `later`."""
    assert cases.keys() >= set(later), set(later) - cases.keys()
    return {name: case for name, case in cases.items() if NIGHTLY or name not in later}
