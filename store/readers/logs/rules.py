"""Rules that classify log lines, loaded from `rules/*.toml` and checked.

    for rule in load_rules():
        rule.kind, rule.literals      # "watchdog_timeout", (b"Watchdog caught collective operation timeout",)

A rule has literals (a line must contain one), a pattern for the fields in the line, the role of such a line in a
verdict, and the source of the wording.
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

__all__ = [
    "Block",
    "Role",
    "Rule",
    "cause_of",
    "continues",
    "field_value",
    "is_claim",
    "is_supposed",
    "load_rules",
    "most_specific",
    "rules_by_literal",
]

Role = Literal[
    "root", "victim", "hang", "death", "kernel", "outside", "numerics", "nccl", "hint", "context", "exception"
]
"""root: names its own cause. victim: failed because another rank did. hang: a call did not end. death: how a process
ended. kernel: reported by the host's kernel or scheduler. outside: ended from outside. numerics, nccl: an error of that
domain. exception: a Python exception. hint, context: explains other lines."""
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
    "port",
    "actor",
    "frames",
]
FOLDER = Path(__file__).with_name("rules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of line. `requires`: a second literal that the line must contain. `block`: how the following lines are
    read.
    """

    kind: str
    role: Role
    literals: tuple[bytes, ...]
    source: str
    cause: str = ""
    pattern: re.Pattern[str] | None = None
    requires: str = ""
    block: Block = ""
    is_general: bool = False
    """True if other rules that match the same line and name a cause take precedence."""


@cache
def load_rules() -> tuple[Rule, ...]:
    """Load all rules. Raises ValueError with the file and the invalid rule."""
    found = [_TRACEBACK, _ERROR_FILE, _RAISED]
    for path in sorted(FOLDER.glob("*.toml")):
        with path.open("rb") as file:
            found += [_rule(path.name, entry) for entry in tomllib.load(file).get("rule", ())]
    return tuple(found)


def _rule(name: str, entry: dict[str, Any]) -> Rule:
    kind = str(entry.get("kind", "?"))
    role: Any = entry.get("role")
    block: Any = entry.get("block", "")
    if role not in get_args(Role) or block not in get_args(Block) or not entry.get("source"):
        raise ValueError(f"{name}: rule {kind}: role, block or source is wrong")
    literals = tuple(str(text).encode() for text in entry.get("literals", ()))
    if not literals or any(len(text) < 4 for text in literals):
        raise ValueError(f"{name}: rule {kind} needs literals of four characters or more")
    return Rule(
        kind=kind,
        role=role,
        literals=literals,
        source=str(entry["source"]),
        cause=str(entry.get("cause", "")),
        pattern=re.compile(entry["pattern"]) if "pattern" in entry else None,
        requires=str(entry.get("requires", "")),
        block=block,
        is_general=bool(entry.get("general", False)),
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
    literals=(b'"py_callstack"', b'"message": {', b'"raw_error": "{\\"message\\": {'),
    source="torch/distributed/elastic/multiprocessing/errors/error_handler.py, events/api.py",
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
    """Return the most specific rule with a cause that matches a text, such as an exception's message."""
    text = f"{text} {' '.join(text.split())}" if "\n" in text else text  # a terminal may have wrapped the lines
    blob = text.encode()
    rules, index = _with_causes()
    held = dict.fromkeys(rules[place] for place in index.literals_in(blob))
    found = [(_specificity(rule, blob), rule) for rule in held if rule.requires in text]
    return max(found, key=lambda pair: pair[0])[1] if found else None


_SUPPOSED = re.compile(
    r"\b(?:may|might|could|possible|possibly|perhaps|maybe|probably|likely)\b(?! (?:not|be (?:retried|ignored))\b)",
    re.IGNORECASE,
)


def is_supposed(text: str, rule: Rule) -> bool:
    """Return True if an error's message only supposes the rule's cause: `may be caused by`, `possibly due to`."""
    places = [text.find(literal.decode()) for literal in rule.literals]
    clauses = [_SENTENCE.split(text[:place])[-1] for place in places if place >= 0]
    return bool(clauses) and all(_SUPPOSED.search(clause) for clause in clauses)


def _specificity(rule: Rule, line: bytes) -> tuple[bool, int]:
    """Sort key: specific rules before general ones, then by the longest literal. (False, 0): no literal in the line."""
    length = max((len(literal) for literal in rule.literals if literal in line), default=0)
    return (not rule.is_general and length > 0, length)


def most_specific(rules: Sequence[Rule | None], line: bytes) -> Sequence[Rule | None]:
    """Keep only the most specific of several rules that name a root cause, because a line has one cause."""
    roots = [rule for rule in rules if rule is not None and rule.role == "root"]
    if len(roots) < 2:
        return rules
    best = max(roots, key=lambda rule: _specificity(rule, line))
    return [rule for rule in rules if rule is None or rule.role != "root" or rule is best]


@cache
def _with_causes() -> tuple[tuple[Rule, ...], LiteralIndex]:
    """Rules of all literals that name a cause, and the literals' index."""
    pairs = [(literal, rule) for rule in load_rules() if rule.role in ("root", "victim", "nccl", "numerics")
             for literal in rule.literals]  # fmt: skip
    return tuple(rule for _, rule in pairs), LiteralIndex([literal for literal, _ in pairs])


@cache
def rules_by_literal() -> tuple[tuple[bytes, ...], tuple[Rule, ...], LiteralIndex]:
    """All literals, their rules, and their index."""
    pairs = [(literal, rule) for rule in load_rules() for literal in rule.literals]
    literals = tuple(literal for literal, _ in pairs)
    return literals, tuple(rule for _, rule in pairs), LiteralIndex(literals)


_CLAIMS = ("root", "victim", "hang", "death", "outside", "kernel", "numerics", "nccl", "exception")
"""Roles of lines that report something that happened."""
_LEVEL = re.compile(r"(?:^|(?<!NCCL)[\s\[|(:-])(?:WARNING|INFO|DEBUG)(?=[\s\]|):,-])|[a-z]Warning: ")
"""A log level below error, with which a program reports that it continues."""
_LEVEL_REACH = 160
"""The log level is searched in this many characters at the start of a line."""
_CONTINUES = re.compile(
    r"\b(?:will ignore|ignor(?:ing|ed)|fall(?:s|ing)? back|retrying|trying (?:again|\d+|another|the next)|next try|"
    r"retry loop|will (?:retry|try again)|(?:going|goes|carr(?:y|ies|ying)) on|continu(?:es|ed|ing)|proceeding|"
    r"skipp(?:ing|ed)|(?<!be )recovered|cached copy|using no|instead(?! of))\b",
    re.IGNORECASE,
)
"""Wordings of programs that continue after an error: they retry, or do without the failed part."""
_ATTEMPT = re.compile(
    r"\b(?:attempt|try|retry(?:ing)?|trial):? ?[#(]?(\d{1,4}) ?(?:/|of|out of) ?(\d{1,4})", re.IGNORECASE
)
_FAILED = re.compile(
    r"(?<!on_)(?<!expected )(?:error|exception|fail(?:ed|s|ure)?|fatal|critical|crashed|could not|cannot|unable)\b",
    re.IGNORECASE,
)
"""Words for a failure that has happened. A cause named after such a word is a claim, regardless of the rest of the
sentence.
"""
_HINT_BEFORE = re.compile(
    # A condition, before or after its consequence: "if ...", "... will help when ...".
    r"(?:^|[,;:(>*-])\W*(?:\w+ )?(?:if|when(?:ever)?|in (?:case|the event)|should|unless|once)\b(?! (?:you )?did)|"
    r"\b(?:will|would|shall|helps?|works?)\b[^,;]{0,60}\b(?:if|when(?:ever)?|with)\b|"
    # Something to avoid, or a possible consequence ("may cause"). But "may be caused by" explains a failure that
    # happened, so it is no hint.
    r"\b(?:to|and|helps?|helping|please) (?:avoid|prevent|work around|debug|diagnose|mitigate|survive)\b|"
    r"\b(?:survives?|tolerates?|handles?|checks? (?:for|of)|checking for|probing for|disables?|enables?)\b|"
    r"\b(?:may|might|can|could|would|will|likely to)\b(?! not\b)(?: \w+)? "
    r"(?:cause|lead|result|trigger|produce|raise|give|end|run|crash|fail|hit|see|encounter|throw)s?\b|"
    r"\b(?:either|possibly|perhaps|maybe|probably)\b[^,;]{0,60}$|\b(?:happens?|occurs?) (?:if|when)\b|"
    # A reference ("see the docs"), an expected failure, or a denial ("no ...", "0 of 8").
    r"\b(?:see|read|refer to|consult) (?:the |our |also )*"
    r"(?:faq|docs?|documentation|entry|section|issues?|guide|wiki|manual)\b|"
    r"\b(?:is|are|was|were) expected\b|\bexpected (?:failures?|errors?)\b|\busage(?: note)?:|"
    r"\b(?:no|without|never|zero) (?:\w+ ){0,2}$|\b0 (?:of|out of|/) ?\d+\b[^,;]*$",
    re.IGNORECASE,
)
"""Words before a cause that make it a condition, a purpose, a possibility, a reference or a denial."""
_HINT_AFTER = re.compile(
    r"[^.:,;]{0,40}\b(?:is|are) expected\b|\W*\.{2,3}\s*(?:ok|no|none|not found|passed)\b|"
    r"(?:s| (?!rank|gpu|device|step|iter|node|worker|process|epoch|pid|id\b)\w+)?[\"']?\s*[:=]\s*"
    r"[\"']?0(?![\d.:]*[\d:])|"
    # One of several possibilities: "... or crashed".
    r"(?:/|,? or )(?:\w+ ){0,2}(?:died|crashed|failed|restarted|killed|lost|unreachable)\b|"
    r"[^.!?]*\?\s|[^.!?]*\?$|(?:[^.!?]|\.(?=\w))*\bmeans? that\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"\b(?:how|what|why|where|which|does|do|is|can)\b", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?]\s+(?=[A-Z\"'`(])")
_KERNEL = re.compile(
    r"\[ *\d{1,9}\.\d{6}\]|\bkernel:|^\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} +\d+ [\d:]{8} 20\d\d\]"
)
"""Prefix of a line of the kernel's log: dmesg, syslog, `dmesg -T`."""
_CODE = re.compile(
    r"\s*(?:\d+\s+)?(?:#\s?(?!Out of bounds )[A-Za-z]|//|/\*|"
    r"(?:except|elif|if|while|for|with|def|class)\b.*:\s*(?:#.*|\w[\w.]*\(.*|\w+ = .*)?$|"
    r"raise \w[\w.]*\(|assert .*,|return\b.*\(|print\(|log(?:ger|ging)?\.\w+\(|warnings\.warn\()"
)
"""A line of source code, from a file or a traceback. (nccl-tests' result line resembles a comment.)"""
_KEY = re.compile(r"[^\"'{}\[\]]{0,60}([\"'])\s*:")
_ITEM = re.compile(r"[^\"'{}\[\]]{0,60}[\"']\s*[,\]]")
_WORDS = re.compile(r"(?:\w+, ?){2,}$")
_SAYS = re.compile(r"(?:msg|message|text|reason|what|status|state|detail)\W*$", re.IGNORECASE)
_PAIRS = re.compile(r"\b[a-z_][\w.]*\s*[:=]\s*[^\s,]+,\s")


def continues(text: str, begin: int, rule: Rule) -> bool:
    """Return True if a line has a log level below error, or says that the program continues or retries."""
    # The first line of a traceback may have a log level, but never says that the program continues.
    is_single_line = rule.role in ("root", "exception") and rule.block != "traceback"
    if (is_single_line or rule.kind == "error_line" or rule.role == "exception") and _LEVEL.search(
        text[begin : begin + _LEVEL_REACH]
    ):
        return True
    if not is_single_line and rule.role not in ("victim", "nccl"):
        return False
    if (attempt := _ATTEMPT.search(text)) is not None:
        return int(attempt[1]) < int(attempt[2])  # "attempt 2 of 3" is retried, "attempt 3 of 3" is not
    return _CONTINUES.search(text) is not None


def is_claim(text: str, begin: int, rule: Rule) -> bool:
    """Return True if a line reports that the matched event has happened.

    False if the literal is part of a condition, advice, a question, a denial, a count of zero, a setting or source
    code. Only the sentence with the literal is examined.
    """
    if rule.kind == "error_line" and _KERNEL.search(text[:begin]):
        return False  # only drivers write to the kernel's log, and the driver continued after this error
    if rule.role not in _CLAIMS or rule.block not in ("", "raised", "terminate"):
        return True
    places = [(at, len(literal)) for literal in (one.decode() for one in rule.literals)
              if (at := text.find(literal, begin)) >= 0]  # fmt: skip
    if not places:
        return True
    at, length = min(places, key=lambda place: (place[0], -place[1]))
    before, after = text[begin:at], text[at + length :]
    if _CODE.match(text[begin:]):
        return False
    start = max((match.end() for match in _SENTENCE.finditer(before)), default=0)
    clause = before[start:]
    if _HINT_BEFORE.search(clause) and not _FAILED.search(clause):
        return False
    if (
        rule.block != "raised"
        and (match := _HINT_AFTER.match(after))
        and ("?" not in match[0] or _QUESTION.search(clause))
    ):
        return False
    return not _is_setting(before, after)


def _is_setting(before: str, after: str) -> bool:
    """Return True if the literal is a key or item of printed settings or metrics."""
    opened = max(before.rfind("{"), before.rfind("["))
    if _FAILED.search(before[: opened + 1] if opened >= 0 else before):
        return False
    is_inside = opened >= 0 and max(before.rfind("}"), before.rfind("]")) < opened
    # A key or an item: {"oom_error": 3} and ["oom_error", "timeout"].
    if is_inside and (_KEY.match(after) or (before[opened] == "[" and _ITEM.match(after))):
        return True
    # A value among others: lr: 0.1, steps: 5, "oom_error" (but message: "oom_error" is a claim). Or an item of a plain
    # list: timeout, nan, oom_error.
    return (len(_PAIRS.findall(before)) > 1 and before[-1:] in ("'", '"') and not _SAYS.search(before)) or (
        _WORDS.search(before) is not None and after[:1] in (",", "")
    )


def field_value(text: str) -> int | str:
    """The value of a field that a pattern found: a whole number, or text."""
    text = text.strip()
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 18 else text[:400]
