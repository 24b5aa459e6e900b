"""docs/schema.md is what the schema says, and its SQL runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from probes.tape.schema import TABLES
from store import Store
from store.ddl import create_statements, fingerprint, store_columns
from store.schema_page import EXAMPLES, markdown
from tests.factories import make_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schema.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "python -m store.schema_page > docs/schema.md"


def test_every_example_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=30, slow={2: 1.5}, gradients_every=5, nan={1: 10}, kill={3: 25})
    examples = re.findall(r"```sql\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(examples) == len(TABLES)
    with Store.open(run) as store:
        answers = {table: store.rows(sql) for table, sql in zip(TABLES, examples, strict=True)}
    assert answers["steps"][0][0] == 2
    assert answers["collectives"][0][0] == 2
    assert answers["gradients"][0][1:3] == (10, 1)
    assert len(answers["spans"]) == 4
    assert answers["process_groups"] == [("world:0-3", "default_pg", [0, 1, 2, 3])]


def test_every_table_has_an_example() -> None:
    assert set(EXAMPLES) == set(TABLES)


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
    monkeypatch.delitem(TABLES, "gradients")
    assert fingerprint() != before
    assert not any("gradients" in statement for statement in create_statements())
