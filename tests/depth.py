"""Number of cases that a test tries: some of them in each run, all of them nightly and in `make trials`.

DAMAGES = tried(150, nightly=500)          # nightly: HYPOTHESIS_PROFILE=nightly
LAYOUTS = usually({"fsdp": ..., "fsdp x tp": ..., "fsdp x tp, bf16": ...}, later=["fsdp x tp, bf16"])

`later` names cases whose parts are covered by other cases; `@later("tests that cover its parts")` marks a whole test.
tests/trials/test_depth.py runs all cases.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TypeVar

import pytest

Case = TypeVar("Case")
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def later(parts: str) -> pytest.MarkDecorator:
    """Run a test, or one of its parameters, only nightly or if it is named (`file::test`); see tests/conftest.py."""
    return pytest.mark.later(parts)


def tried(usually: int, *, nightly: int) -> int:
    return nightly if NIGHTLY else usually


def usually(cases: Mapping[str, Case], *, later: Collection[str]) -> dict[str, Case]:
    """All cases nightly, otherwise those that are not in `later`."""
    assert cases.keys() >= set(later), set(later) - cases.keys()
    return {name: case for name, case in cases.items() if NIGHTLY or name not in later}
