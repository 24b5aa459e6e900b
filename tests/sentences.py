"""The shape of every sentence that a person reads in a verdict: short, plain, ended."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence

from analyzers.finding import Finding
from analyzers.kinds import KINDS

__all__ = ["assert_plain", "plain"]

MAX_CHARACTERS = 240  # long names of parameters and groups included; most sentences are half as long
_NESTED = re.compile(r"\([^()]*\(")
_DIALECT = re.compile(r"\b(told|said|alike|somebody|nobody|whoever|without a word|went back and on|mend(ed)?)\b", re.I)


def assert_plain(text: str, *, max_characters: int = MAX_CHARACTERS) -> None:
    """One to three sentences: a capital letter or a digit first, a full stop last, nothing nested, no semicolons."""
    assert text, "an empty sentence"
    assert text == text.strip(), f"white space around: {text!r}"
    assert "\n" not in text, f"line ends in: {text!r}"
    assert text[0].isupper() or text[0].isdigit() or text[0] in "`/", f"no capital letter at the start of: {text}"
    assert text[-1] in ".?!", f"no full stop at the end of: {text}"
    assert len(text) <= max_characters, f"{len(text)} characters: {text}"
    assert not _NESTED.search(text), f"nested parentheses in: {text}"
    assert ";" not in text, f"a chain of clauses in: {text}"
    assert not _DIALECT.search(text), f"not plain English: {text}"


def plain(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, once their summary, evidence and next step have the shape of plain sentences."""
    for finding in findings:
        assert_plain(finding.summary)
        if finding.status in ("fired", "suspect", "advice"):
            explain = importlib.import_module(f"analyzers.{KINDS[finding.kind].package}.explain")
            assert_plain(explain.WHY[finding.kind](finding))
            assert_plain(explain.NEXT[finding.kind](finding))
    return list(findings)
