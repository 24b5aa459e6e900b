"""The catalogue of events: what writes and reads events names their kinds by it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.fail_open import error_counts
from probes.tape import event_kinds
from probes.tape.event_kinds import EVENT_KINDS
from probes.tape.events import EventWriter
from probes.tape.format.schema import TABLES

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("probes", "store", "analyzers", "watch", "trainer", "dashboard", "rankscope")
SQL_KIND = re.compile(r"\bFROM events\b.*?\bkind\s*(?:=|!=|<>|(?:NOT\s+)?IN)\s*\(?\s*'\w", re.DOTALL | re.IGNORECASE)
# SQL that a reader copies, and lines of text logs, which have kinds of their own.
OTHERS = ("analyzers/report/schema_page.py", "store/readers/logs/")


def written_out(tree: ast.AST) -> Iterator[ast.expr]:
    """Kinds that stand in code as text: given to what writes or reads events, or inside SQL over them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            called, on = node.func.attr, ast.unparse(node.func.value)
            first = node.args[0]
            if called == "event" or (called == "write" and "events" in on) or (called == "of" and "log" in on.lower()):
                yield first
            if called == "load" and on.endswith("EventLog"):
                yield from getattr(node.args[1], "elts", ())
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL_KIND.search(node.value):
            yield node
        if isinstance(node, ast.Compare) and ast.unparse(node.left) in ("event.kind", "event['kind']"):
            yield from node.comparators


def test_no_code_spells_a_kind_as_a_string() -> None:
    found = []
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(OTHERS):
            continue
        for text in written_out(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found.append(f"{name}:{text.lineno}: {text.value[:60]}")
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "recorder.event('rollback', step=1)",
        "self.events.write('xid')",
        "EventLog.load(source, ('rollback',))",
        "log.of('rollback')",
        "event['kind'] == 'rank'",
        "rows(\"SELECT rank FROM events WHERE kind = 'rank'\")",
    ],
)
def test_the_reader_of_the_code_finds_text(source: str) -> None:
    assert [node for node in written_out(ast.parse(source)) if isinstance(node, ast.Constant)]


def test_constants_are_the_names_of_the_kinds() -> None:
    constants = {name for name in vars(event_kinds) if name.isupper() and name[0] != "_"}
    assert {name.lower() for name in constants - {"EVENT_KINDS", "COMMON_FIELDS", "TABLES"}} == set(EVENT_KINDS)
    assert all(getattr(event_kinds, name.upper()) == name for name in EVENT_KINDS)


@pytest.mark.parametrize("kind", EVENT_KINDS.values(), ids=lambda kind: kind.name)
def test_an_entry_is_complete(kind: event_kinds.EventKind) -> None:
    assert kind.written_by
    assert re.fullmatch(r"(?:[A-Z`]|fp16).*\.", kind.meaning)
    assert len({field.name for field in kind.fields}) == len(kind.fields)
    for field in kind.fields:
        assert not field.name.endswith("_ns") or field.unit == "ns"
        assert not field.name.endswith("_s") or field.unit == "s"
        assert not field.name.endswith("_bytes") or field.unit == "By"


def test_event_tables_and_event_kinds_agree() -> None:
    of_tables = {table.event_kind: table.name for table in TABLES.values() if table.event_kind}
    assert {kind.name: kind.table for kind in EVENT_KINDS.values() if kind.table} == of_tables


def test_an_unknown_kind_or_field_fails_in_tests_and_is_counted_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventWriter(tmp_path / "events.jsonl", attempt=0, rank=0)
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    with pytest.raises(ValueError, match="rolback"):
        events.write("rolback", to_step=1)
    with pytest.raises(ValueError, match="to_stepp"):
        events.write(event_kinds.ROLLBACK, to_stepp=1)
    monkeypatch.delenv("RANKSCOPE_FAIL_LOUD")
    before = error_counts["events.unknown_kind"]
    events.write("rolback", to_step=1)
    assert error_counts["events.unknown_kind"] == before + 1
    events.close()
    assert json.loads((tmp_path / "events.jsonl").read_text())["kind"] == "rolback"
