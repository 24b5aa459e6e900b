"""No test waits for a fixed time, and none gives a real process less time than a crowded machine needs.

Trials (tests/trials), which have a rate and not a truth value, may.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import run_python

TESTS = Path(__file__).parent
LEAST_S = 30.0
"""Smallest allowed timeout in seconds: one that does not expire costs nothing."""

SLEEPS = {
    "waiting.py": "waits for a condition: the only place that does",
    "analyzers/evidence/test_traces.py": "the delay of the slow rank: load only makes it longer",
    "rankscope/bad_plugins.py": "a plug-in that does not return",
    "trainer/launcher/test_stop_signals.py": "a second Ctrl-C counts only a moment later: load only makes it longer",
    "e2e/slow_ddp.py": "the delay of the slow rank: load only makes it longer",
    "e2e/test_launcher_killed.py": "the pace of a loop that is killed at no special moment",
    "probes/small_models.py": "the delay of the slow rank: load only makes it longer",
    "store/readers/test_http_deadline.py": "outlives a limit of 0.1 s: load only makes it longer",
    "watch/stacks/test_line_sampling.py": "the lines in which ranks stand, one a hundred times as long as the other",
    "watch/stacks/test_recorder_dumps.py": "a writer that is off its core in the middle: load only makes it longer",
}
BOUNDS = {
    "watch/test_evidence.py": "a writer that is off its core in the middle: load only makes it longer",
    "watch/health/test_sources.py": "a queue of the test's own, which has what is asked for, or must be empty",
    "watch/test_last_round.py": "an end that must not come: load only makes it later",
}
_WAITS = {"acquire", "communicate", "join", "result", "wait"}
_CLOCKS = {"monotonic", "perf_counter", "time"}


def sources(*words: str) -> Iterator[tuple[str, ast.Module]]:
    """Test files that contain one of the words."""
    for path in sorted(TESTS.rglob("*.py")):
        name, text = path.relative_to(TESTS).as_posix(), path.read_text(encoding="utf-8")
        if not name.startswith("trials/") and path != Path(__file__) and any(word in text for word in words):
            yield name, ast.parse(text)


def programs(tree: ast.AST) -> Iterator[tuple[int, ast.Module]]:
    """String constants that are programs: tests give them to an interpreter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "sleep(" in node.value:
            text, at = node.value, node.lineno
        elif isinstance(node, ast.JoinedStr) and "sleep(" in ast.unparse(node):
            text, at = "".join(p.value if isinstance(p, ast.Constant) else "0" for p in node.values), node.lineno
        else:
            continue
        try:
            yield at, ast.parse(text)
        except SyntaxError:
            continue


def number(node: ast.expr) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def short_sleeps(tree: ast.AST, *, in_program: bool) -> Iterator[int]:
    """Lines that sleep and continue. A process that sleeps for `LEAST_S` waits to be killed."""
    polls: set[ast.AST] = set()
    if in_program:  # a loop that polls a condition, without `wait_for`
        loops = [
            loop for loop in ast.walk(tree) if isinstance(loop, ast.While) and not isinstance(loop.test, ast.Constant)
        ]
        polls = {node for loop in loops for node in ast.walk(loop)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node) == "sleep" and node.args and node not in polls:
            length = number(node.args[0])
            if length is None or 0 < length < LEAST_S:  # zero yields the interpreter
                yield node.lineno


def small_bounds(tree: ast.Module) -> Iterator[int]:
    """Lines that give up, or call it too slow, after less than `LEAST_S`."""
    intended: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and re.search("Timeout|deadline", ast.unparse(node.items[0])):
            intended |= {*ast.walk(node)}  # the timeout itself is tested
        elif isinstance(node, ast.While):
            intended |= {*ast.walk(node.test)}  # the pace of a thread: `while not over.wait(0.02)`
    for node in ast.walk(tree):
        if node in intended:
            continue
        if isinstance(node, ast.Call):
            bounds = [keyword.value for keyword in node.keywords if keyword.arg in ("timeout", "deadline_s")]
            if name_of(node) in _WAITS and isinstance(node.func, ast.Attribute):
                bounds += node.args[:1]
            if any((bound := number(value)) is not None and 0 < bound < LEAST_S for value in bounds):
                yield node.lineno
        elif isinstance(node, ast.Compare) and _reads_a_clock(node.left):
            limits = zip(node.ops, map(number, node.comparators), strict=True)
            if any(isinstance(op, ast.Lt | ast.LtE) and n is not None and 0 < n < LEAST_S for op, n in limits):
                yield node.lineno


def _reads_a_clock(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _CLOCKS
        for part in ast.walk(node)
    )


def test_no_test_sleeps() -> None:
    found: dict[str, list[int]] = {}
    for name, tree in sources("sleep("):
        lines = [*short_sleeps(tree, in_program=False)]
        lines += [at + line for at, program in programs(tree) for line in short_sleeps(program, in_program=True)]
        if lines:
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in SLEEPS} == {}, "wait for a condition"
    assert set(SLEEPS) <= set(found), "allowed, but there is none any more"


def test_no_bound_is_below_half_a_minute() -> None:
    words = ("timeout=", "deadline_s=", *(f".{name}(" for name in (*_WAITS, *_CLOCKS)))
    found = {name: lines for name, tree in sources(*words) if (lines := [*small_bounds(tree)])}
    assert {name: lines for name, lines in found.items() if name not in BOUNDS} == {}, f"at least {LEAST_S:.0f} s"
    assert set(BOUNDS) <= set(found), "allowed, but there is none any more"


@pytest.mark.parametrize("line", ["time.sleep(2)", "sleep(pause_s)"])
def test_a_sleep_is_found(line: str) -> None:
    assert [*short_sleeps(ast.parse(line), in_program=False)] == [1]
    assert [*short_sleeps(ast.parse(f"while not there(): {line}"), in_program=True)] == []


@pytest.mark.parametrize(
    "line", ["process.wait(20)", "thread.join(timeout=5)", "wait_for(there, 'x', deadline_s=10)",
             "assert time.monotonic() - began < 5", "process.communicate(timeout=8)"],
)  # fmt: skip
def test_a_small_bound_is_found(line: str) -> None:
    assert [*small_bounds(ast.parse(line))] == [1]


def test_a_test_with_a_thread_or_process_is_one_that_may_fail_by_chance(tmp_path: Path) -> None:
    """Only such a test runs again by itself when it fails."""
    records = tmp_path / "records.jsonl"
    bodies = ("1 + 1", "threading.Thread(target=str).start()", "subprocess.run(['true'])")
    for number, body in enumerate(bodies):
        path = tmp_path / f"test_kind_{number}.py"
        path.write_text(f"import subprocess, threading\n\n\ndef test_it() -> None:\n    {body}\n")
    arguments = ["-p", "tests.support.results", "--results", str(records), "-p", "no:cacheprovider", str(tmp_path)]
    done = run_python(["-m", "pytest", "-q", *arguments])
    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert [row["real"] for row in rows if "outcome" in row] == [False, True, True]
