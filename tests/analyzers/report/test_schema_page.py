"""docs/schema.md is what the schema says, and its SQL runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analyzers.report.schema_page import EXAMPLES, markdown
from probes.tape.event_kinds import EVENT_KINDS
from probes.tape.format.schema import TABLES
from store import Store, ddl
from store.ddl import create_statements, fingerprint, store_columns
from tests.factories import make_run

PAGE = Path(__file__).resolve().parents[3] / "docs" / "schema.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "python -m analyzers.report.schema_page > docs/schema.md"


def test_every_example_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=30, slow={2: 1.5}, gradients_every=5, nan={1: 10}, kill={3: 25})
    examples = re.findall(r"```sql\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == len(EXAMPLES)
    with Store.open(run) as store:
        tables = [table for table in TABLES if table in EXAMPLES]
        answers = {table: store.rows(sql) for table, sql in zip(tables, examples, strict=True)}
    assert answers["steps"][0][0] == 2
    assert answers["collectives"][0][0] == 2
    assert answers["gradients"][0][1:3] == (10, 1)
    assert len(answers["spans"]) == 4


def test_every_record_names_who_writes_it_and_where_it_is_shown() -> None:
    text = markdown()
    head, *tables = re.split(r"^## ", text, flags=re.MULTILINE)
    letters = set(re.findall(r"^\| ([A-Z]) \|", head, flags=re.MULTILINE))
    for table, part in zip(TABLES.values(), tables, strict=False):
        assert part.startswith(table.name)
        about, *columns = part.split("\n- ")
        assert ("Written " in about) == (table.source != "tape")
        (usual,) = re.findall(r"\[([A-Z]+)\]$", about.strip(), flags=re.MULTILINE)
        assert set(usual) <= letters
        text = "\n".join(columns)
        for column in store_columns(table):
            assert f"`{column.name}`" in text, (table.name, column.name)
        assert {letter for found in re.findall(r"\[([A-Z]+)\]", text) for letter in found} <= letters
    for kind in EVENT_KINDS:
        assert re.search(rf"^- `{kind}`(?: \[[A-Z]+\])? \(\w", tables[-1], flags=re.MULTILINE), kind


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_columns_have_a_unit_and_a_meaning(table: object) -> None:
    columns = store_columns(table)  # type: ignore[arg-type]
    assert len({column.name for column in columns}) == len(columns)
    for column in columns:
        assert column.help
        assert not column.name.endswith("_ns") or column.unit == "ns"
        assert not column.name.endswith("_bytes") or column.unit == "By"


def test_the_fingerprint_follows_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    assert before == fingerprint()
    others = {name: table for name, table in TABLES.items() if name != "gradients"}
    monkeypatch.setattr(ddl, "TABLES", others)  # a key put back into the dict would come last for every later test
    assert fingerprint.__wrapped__() != before, "it is kept, as tables do not change in a process"
    assert not any("gradients" in statement for statement in create_statements())
