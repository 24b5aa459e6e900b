"""The rules of log lines: data in `rules/*.toml`, checked when they are loaded.

    for rule in load_rules():
        rule.kind, rule.literals      # "watchdog_timeout", (b"Watchdog caught collective operation timeout",)

A rule names literals that a line must contain (one of them), a pattern for the fields in it, the role of such a line
in a verdict, and the place where the wording comes from.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from store.readers.logs.line_filter import LiteralIndex

__all__ = ["Block", "Role", "Rule", "cause_of", "load_rules", "most_specific", "rules_by_literal"]

Role = Literal[
    "root", "victim", "hang", "death", "kernel", "outside", "numerics", "nccl", "hint", "context", "exception"
]
"""root: names its own cause. victim: died of another rank. hang: a call did not end. death: how a process ended.
kernel: the host's kernel or its scheduler says so. outside: ended from outside. hint, context: explains others."""
Block = Literal[
    "",
    "traceback",
    "elastic",
    "error_file",
    "raised",
    "usage",
    "ras",
    "norms",
    "others",
    "terminate",
    "stalled",
    "culprits",
    "tasks",
    "bus",
]
FOLDER = Path(__file__).with_name("rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of line. `requires`: another literal that must stand in the same line. `block`: lines that follow."""

    kind: str
    role: Role
    literals: tuple[bytes, ...]
    source: str
    cause: str = ""
    pattern: re.Pattern[str] | None = None
    requires: str = ""
    block: Block = ""
    is_general: bool = False
    """Other rules that match the same line and name the cause come first."""


@cache
def load_rules() -> tuple[Rule, ...]:
    """All rules. Raises ValueError for one that cannot be used, with its file."""
    found = [_TRACEBACK, _ERROR_FILE, _RAISED]
    for path in sorted(FOLDER.glob("*.toml")):
        with path.open("rb") as file:
            found += [_rule(path.name, about) for about in tomllib.load(file).get("rule", ())]
    return tuple(found)


def _rule(name: str, about: dict[str, Any]) -> Rule:
    kind = str(about.get("kind", "?"))
    role: Any = about.get("role")
    block: Any = about.get("block", "")
    if role not in get_args(Role) or block not in get_args(Block) or not about.get("source"):
        raise ValueError(f"{name}: rule {kind}: role, block or source is wrong")
    literals = tuple(str(text).encode() for text in about.get("literals", ()))
    if not literals or any(len(text) < 4 for text in literals):
        raise ValueError(f"{name}: rule {kind} needs literals of four characters or more")
    return Rule(
        kind=kind,
        role=role,
        literals=literals,
        source=str(about["source"]),
        cause=str(about.get("cause", "")),
        pattern=re.compile(about["pattern"]) if "pattern" in about else None,
        requires=str(about.get("requires", "")),
        block=block,
        is_general=bool(about.get("general", False)),
    )


_TRACEBACK = Rule(
    kind="exception",
    role="exception",
    literals=(b"Traceback (most recent call last)",),
    source="Python's traceback module",
    block="traceback",
)
_ERROR_FILE = Rule(
    kind="exception",
    role="exception",
    literals=(b'"py_callstack"', b'"message": {'),
    source="torch/distributed/elastic/multiprocessing/errors/error_handler.py",
    block="error_file",
)
_RAISED = Rule(
    kind="exception",
    role="exception",
    literals=(b"Error: ", b"Exception: "),
    source="the last line of a traceback, where the rest is missing",
    block="raised",
)


def cause_of(text: str) -> Rule | None:
    """The rule with a cause that a text (the message of an exception) falls under, the most specific one."""
    text = f"{text} {' '.join(text.split())}" if "\n" in text else text  # a terminal may have broken the lines
    blob = text.encode()
    rules, index = _with_causes()
    held = dict.fromkeys(rules[place] for place in index.held(blob))
    found = [(_specificity(rule, blob), rule) for rule in held if rule.requires in text]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _specificity(rule: Rule, line: bytes) -> tuple[bool, int]:
    """Specificity of a rule for a line: no general wording, then its longest literal. (False, 0): not in the line."""
    length = max((len(literal) for literal in rule.literals if literal in line), default=0)
    return (not rule.is_general and length > 0, length)


def most_specific(rules: Sequence[Rule | None], line: bytes) -> Sequence[Rule | None]:
    """A line has one cause: of several rules that name one, the most specific rule's."""
    roots = [rule for rule in rules if rule is not None and rule.role == "root"]
    if len(roots) < 2:
        return rules
    best = max(roots, key=lambda rule: _specificity(rule, line))
    return [rule for rule in rules if rule is None or rule.role != "root" or rule is best]


@cache
def _with_causes() -> tuple[tuple[Rule, ...], LiteralIndex]:
    """The rule of each literal that names a cause, and the literals' index."""
    pairs = [(literal, rule) for rule in load_rules() if rule.role in ("root", "victim", "nccl", "numerics")
             for literal in rule.literals]  # fmt: skip
    return tuple(rule for _, rule in pairs), LiteralIndex([literal for literal, _ in pairs])


@cache
def rules_by_literal() -> tuple[tuple[bytes, ...], tuple[Rule, ...], LiteralIndex]:
    """All literals of rules, the rule of each, and their index."""
    pairs = [(literal, rule) for rule in load_rules() for literal in rule.literals]
    literals = tuple(literal for literal, _ in pairs)
    return literals, tuple(rule for _, rule in pairs), LiteralIndex(literals)
