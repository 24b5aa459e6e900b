"""Lines of logs that a reader plug-in returns: those that no rule knows are refused by name, all others are judged."""

from __future__ import annotations

import random
from typing import Any

import pytest

from analyzers.evidence.log_findings import analyze
from store.readers.logs.rules import load_rules
from store.readers.memory_store import MemoryStore
from store.readers.plugins.plugin_rows import checked_rows

KINDS = sorted({rule.kind for rule in load_rules()})
FIELDS = sorted({name for rule in load_rules() if rule.pattern for name in rule.pattern.groupindex})
VALUES: tuple[Any, ...] = ("", "x", "3", 3, -1, 1.5, [1, 2], {"a": 1}, True, "1,2", "1-999999", 1 << 62)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"rank": 1, "kind": "oom"}, "1 row of log_events: no rule has kind 'oom' (similar: oom_kill, "),
        ({"rank": 1, "message": "boom"}, "1 row of log_events: kind is missing"),
        ({"kind": "zzzzqqqq"}, "1 row of log_events: no rule has kind 'zzzzqqqq'"),
        ({"kind": "exception", "fields": [1]}, "1 row of log_events: fields is a list instead of a mapping"),
    ],
)
def test_a_line_of_no_rule_is_refused(row: dict[str, Any], reason: str) -> None:
    ((table, told),) = checked_rows({"log_events": [row]})
    assert table == "refused"
    assert told.startswith(reason)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"kind": "exception", "message": "ValueError: bad shape"}, "Rank 1 raised ValueError: bad shape."),
        ({"kind": "exception", "message": "bad shape"}, "Rank 1 raised bad shape."),
        ({"kind": "exception"}, "Rank 1 raised an exception."),
        ({"kind": "exception", "message": "x", "fields": {"type": "KeyError", "message": "'a'"}},
         "Rank 1 raised KeyError: 'a'."),
    ],
)  # fmt: skip
def test_a_message_without_fields_is_read_as_a_line_of_a_log(row: dict[str, Any], said: str) -> None:
    ((_, checked),) = checked_rows({"log_events": [{"rank": 1, **row}]})
    with MemoryStore() as store:
        store.add("log_events", [{"message": "", "source": "team.log", **checked}])
        (finding, *_) = analyze(store)
    assert finding.summary == said


@pytest.mark.parametrize("part", range(4))
def test_lines_of_every_rule_are_judged(part: int) -> None:
    rng = random.Random(part)
    for kind in KINDS[part::4]:
        given = []
        for place, name in enumerate((kind, rng.choice(KINDS))):
            row: dict[str, Any] = {"kind": name, "message": rng.choice(("boom", "RuntimeError: x", ""))}
            row |= {"rank": rng.randrange(4)} if rng.random() < 0.7 else {}
            row |= {"line": place} if rng.random() < 0.5 else {}
            row["fields"] = {field: rng.choice(VALUES) for field in rng.sample(FIELDS, 12)}
            given.append(row)
        checked = list(checked_rows({"log_events": given}))
        assert [table for table, _ in checked] == ["log_events"] * 2
        lines = [{"message": "", "source": "team.log", **row} for _, row in checked]
        with MemoryStore() as store:
            store.add("log_events", lines)
            findings = analyze(store)
        assert all(finding.summary for finding in findings), kind
