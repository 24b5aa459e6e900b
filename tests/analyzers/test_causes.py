"""The table of causes: each row is complete, can be emitted, and has a section in the runbook."""

from __future__ import annotations

import re
from pathlib import Path
from string import Formatter
from typing import get_args

import pytest

from analyzers.causes import CAUSES, SIGNALS, WORDS, cause_names, next_step
from analyzers.kinds import KINDS
from analyzers.run.ends.endings import DeathCause
from store.readers.logs.rules import load_rules

ROOT = Path(__file__).parents[2]


def fields(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


@pytest.mark.parametrize("name", CAUSES)
def test_the_row_of_a_cause_is_complete(name: str) -> None:
    row = CAUSES[name]
    assert row.do.endswith(".")
    assert fields(row.do) <= {"ranks", "caller", "stack", "unseen", "devices", *WORDS[True]}
    assert fields(row.log_text) <= {"who", "error", "at"}
    if row.log_text:  # a line of a log names it: the sentence says who, or what the line said
        assert fields(row.log_text) & {"who", "error"}
        assert row.blame in ("rank", "outside") or "error" in fields(row.log_text)
    step = next_step(name, (3,), caller=" at train.py:7", stack=" (in train.py:9 wait)", unseen=(5,))
    assert step[0].isupper()
    assert not re.search(r"[{}]|  ", step)
    assert f'<a id="{row.advice}"></a>' in (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("signal", ["", *SIGNALS])
@pytest.mark.parametrize("name", CAUSES)
def test_a_next_step_agrees_with_the_number_of_ranks(name: str, signal: str) -> None:
    steps = [next_step(name, (0, 1), signal=signal), next_step(name, (), signal=signal, processes=(71, 72))]
    of_several = [one for step in steps for one in step.split(". ") if re.search("ranks 0 and 1|processes 71", one)]
    for step in of_several:
        assert not re.search(r"\b(?:it|its|itself|that rank|(?:log|host|stack|end) of (?:ranks|processes))\b", step)
    assert "the ends of the logs of ranks 0 and 1: they exited by themselves" in next_step("exit", (0, 1))
    assert "the end of the log of rank 3: it exited by itself" in next_step("exit", (3,))


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_by_a_rule_or_an_analyzer(name: str) -> None:
    sources = [path for path in (ROOT / "analyzers").rglob("*.py") if path.name != "causes.py"]
    sources += [*(ROOT / "store" / "readers").rglob("*.py"), *(ROOT / "store" / "readers").rglob("*.toml")]
    named = any(f'"{name}"' in path.read_text(encoding="utf-8") for path in sources)
    assert named, f"no code and no rule can report {name}: remove its row, or the test knows too little"


def test_the_table_has_each_cause_once() -> None:
    source = (ROOT / "analyzers" / "causes.py").read_text(encoding="utf-8").split("SIGNALS: Mapping")[0]
    listed = re.findall(r'Cause\(name="(\w+)"', source)
    assert len(listed) == len(set(listed)) == len(CAUSES)


def test_a_rule_of_a_log_names_causes_that_a_line_can_show() -> None:
    of_rules = {rule.cause for rule in load_rules() if rule.cause}
    assert len(of_rules) > 20
    assert of_rules <= {*CAUSES}
    without_text = {name for name in of_rules if not CAUSES[name].log_text}
    assert without_text <= {"not_entered"}  # its ranks are named by the line itself


def test_causes_found_in_records_have_a_sentence() -> None:
    deaths = {*get_args(DeathCause)}
    assert {name for name in deaths if not CAUSES[name].record_text} == set()
    assert {row.record_text for row in SIGNALS.values()} == {CAUSES["signal"].record_text}


def test_causes_in_user_code_are_derived_from_the_table() -> None:
    for kind in ("rank_lost", "hang"):
        assert KINDS[kind].user_causes == {row.name for row in CAUSES.values() if row.kind == kind and row.by_user}
        assert KINDS[kind].user_causes < cause_names(kind)
    assert not CAUSES["device_error"].by_user


def test_a_signal_has_a_next_step_of_its_own() -> None:
    assert "out-of-memory killer" in next_step("signal", (3,), signal="SIGKILL")
    assert "core dump" in next_step("signal", (3,), signal="SIGSEGV")
    assert next_step("signal", (3,), signal="SIGFPE") == next_step("vanished", (3,))


def test_a_next_step_refers_to_no_stack_that_is_not_known() -> None:
    assert "stack" not in next_step("data", (3,))
    assert "(in loader.py:51 next_batch)" in next_step("data", (3,), stack=" (in loader.py:51 next_batch)")


def test_a_queried_state_of_a_job_is_not_cut_off() -> None:
    """The default width of sacct's State cuts "CANCELLED by 1000" to "CANCELLED+"."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "analyzers").rglob("*.py")]
    texts.append((ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"))
    queries = [query for text in texts for query in re.findall(r"sacct -j JOB\b[^\"`\n]*", text)]
    assert len(queries) >= 4
    assert [query for query in queries if "State%" not in query] == []


def test_an_exception_without_a_line_refers_to_none() -> None:
    assert "line" not in next_step("exception", (3,))
