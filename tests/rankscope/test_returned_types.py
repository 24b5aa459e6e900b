"""What the API returns has types: no `Any`, found by a walk from its names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rankscope
from analyzers.account.by_step import CLASSES
from analyzers.finding import Finding
from rankscope import api
from tests.factories import make_run
from tests.rankscope.returned_types import reached, untyped

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", [rankscope, api])
def test_nothing_that_the_api_returns_is_any(module: ModuleType) -> None:
    assert untyped(module) == []
    names = {one.__name__ for one in reached(module)}
    assert {"Finding", "Diagnosis", "Comparison", "QueryResult", "AccountByStep", "RunState", "WhatIf"} <= names


class Inner:
    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.plain = 1

    @property
    def shown(self) -> Mapping[str, Any]:
        return {}

    def given(self) -> int:
        return len(self.kept)

    def unstated(self):  # type: ignore[no-untyped-def]
        return self.kept


@dataclass
class Outer:
    of: Callable[[int], Any]
    inner: list[Inner]
    whole: int = 0


def opened() -> Outer | None:
    return None


def test_the_walk_finds_any_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rankscope.returned_types.OURS", (__name__,))
    made = ModuleType("made")
    made.__dict__.update(opened=opened, __all__=["opened"])
    places = {line.partition(":")[0] for line in untyped(made)}
    inner = "opened -> Outer.inner -> Inner"
    assert places == {"opened -> Outer.of", f"{inner}.kept", f"{inner}.plain", f"{inner}.shown", f"{inner}.unstated"}


def test_rows_with_stated_types(tmp_path: Path) -> None:
    run = rankscope.open_run(make_run(tmp_path, ranks=2, steps=20).path)
    rows = api.typed(run.sql("SELECT rank, count(*), 1.5, 'a', true FROM steps GROUP BY rank ORDER BY 1"),
                     int, int, float, str, bool)  # fmt: skip
    assert rows == [(0, 20, 1.5, "a", True), (1, 20, 1.5, "a", True)]
    assert type(rows[0][2]) is float
    ((missing,),) = api.typed(run.sql("SELECT NULL::DOUBLE"), float)
    assert math.isnan(missing)
    with pytest.raises(ValueError, match=r"^column 1 of row 1 is null, not int$"):
        api.typed(run.sql("SELECT NULL::INTEGER"), int)
    with pytest.raises(ValueError, match=r"^typed\(\) was given 1 type for a row of 2 columns$"):
        api.typed(run.sql("SELECT 1, 2"), int)
    assert api.typed([], int) == []


def test_a_value_of_the_evidence_has_the_stated_type() -> None:
    evidence = {"ms": 3, "ranks": [1], "yes": True, "word": "a", "exact": Decimal("1.5"), "none": None}
    finding = Finding.advise("a", "hang", "Text.", evidence=evidence)
    assert (finding.value("ms", float), finding.value("ms", int), finding.value("exact", float)) == (3.0, 3, 1.5)
    assert (finding.value("yes", bool), finding.value("word", str)) == (True, "a")
    for name, kind, words in [
        ("yes", int, "yes is of type bool, not int"), ("word", float, "word is of type str, not float"),
        ("none", float, "none is null, not float"), ("ranks", str, "ranks is of type list, not str"),
        ("ms", bool, "ms is of type int, not bool"), ("gone", int, "no evidence 'gone': it has ms, ranks, yes"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            finding.value(name, kind)


TABLE = re.findall(r"^\| `(\w+)` (?:\([^|]*\) )?\| (.*) \|$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
DOCUMENTED = {name: set(re.findall(r"`(\w+)(?![\w.])", text)) for name, text in TABLE if hasattr(api, name)}
UNNAMED = {"identity"}
"""Of findings: for stores and former reports."""


def attributes(kind: type) -> set[str]:
    """Names of fields and properties."""
    properties = {name for name, one in vars(kind).items() if isinstance(one, property)}
    return {*properties, *(field.name for field in (fields(kind) if is_dataclass(kind) else ()))}


@pytest.mark.parametrize("name", [name for name in sorted(DOCUMENTED) if is_dataclass(getattr(api, name))])
def test_the_docs_name_every_attribute_and_no_other(name: str) -> None:
    kind = getattr(api, name)
    public = attributes(kind) - UNNAMED
    assert public - DOCUMENTED[name] == set(), "not in the table of docs/api.md"
    nested = {one for other in reached(api) for one in attributes(other)} | {*CLASSES}
    others = {one for one in DOCUMENTED[name] - public if one.islower()} - nested - {*vars(kind)}
    assert others == set(), "named in the table of docs/api.md, and not there"


def test_the_docs_have_the_types_that_are_returned() -> None:
    returned = {"AccountByStep", "Change", "Comparison", "Diagnosis", "Drawing", "Finding", "LossChange", "RunState"}
    assert DOCUMENTED.keys() >= returned


def test_what_the_docs_ask_of_a_run_is_there() -> None:
    """A renamed module had changed `run.state` to `run.live.state` in a row that no other test reads."""
    asked = set(re.findall(r"\brun\.(\w+)", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"))) - {"json"}
    assert {"state", "verdict", "sql"} <= asked
    assert {name for name in asked if not hasattr(api.Run, name)} == set()
