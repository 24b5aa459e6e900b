"""Check a plug-in's declarations and results before they reach a report.

    findings, refused = checked_findings(returned, kinds={"slow_save"})
    refused                 # ("refused a finding: severity 'huge' is not one of critical, warning, info",)

A finding that fails a check is dropped and the others are kept; `refused` lists each reason once.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any, get_args

from analyzers.finding import SEVERITIES, Finding, Status

__all__ = ["MAX_FINDINGS", "MAX_REASONS", "MAX_TEXT_CHARS", "checked_findings", "checked_kinds"]

MAX_FINDINGS = 20
"""Maximum number of findings of one call: more would hide the findings of other analyses."""
MAX_TEXT_CHARS = 1_000
MAX_EVIDENCE_BYTES = 64 << 10
MAX_REASONS = 10
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_ANCHOR = re.compile(r"[a-z0-9-]{0,80}")
_FIELDS = frozenset(one.name for one in fields(Finding))


def checked_findings(returned: Any, kinds: Collection[str]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the findings as JSON values, and why others were refused. Raises TypeError if `returned` is not an
    iterable of findings."""
    if returned is None or isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
        raise TypeError(f"the analysis returned {type(returned).__name__} instead of a list of findings")
    accepted: list[dict[str, Any]] = []
    reasons: Counter[str] = Counter()
    seen: set[tuple[object, ...]] = set()
    first = list(islice(returned, MAX_FINDINGS + 1))
    for one in first[:MAX_FINDINGS]:
        try:
            found = _checked(one, kinds)
        except (TypeError, ValueError) as error:
            reasons[str(error)] += 1
            continue
        key = (one.kind, one.attempt, one.first_step, one.ranks, one.cause, one.summary)
        if key in seen:
            reasons["it is the same as another one"] += 1
            continue
        seen.add(key)
        accepted.append(found)
    refused = [
        f"refused a finding: {reason}{f' ({count} findings)' if count > 1 else ''}" for reason, count in reasons.items()
    ]
    if len(first) > MAX_FINDINGS:
        refused.insert(0, f"it returned more than {MAX_FINDINGS} findings, and only the first {MAX_FINDINGS} are used")
    return accepted, tuple(refused[:MAX_REASONS])


def _checked(returned: Any, kinds: Collection[str]) -> dict[str, Any]:
    """One finding as JSON values. Raises ValueError or TypeError with one line."""
    if not isinstance(returned, Finding):
        raise TypeError(f"a {type(returned).__name__} is not a finding")
    finding: Any = returned  # a field may have any type until it is checked
    if finding.kind not in kinds:
        raise ValueError(f"kind {_shown(finding.kind)} is not one of its kinds ({', '.join(sorted(kinds)) or 'none'})")
    _one_of("severity", finding.severity, SEVERITIES)
    _one_of("status", finding.status, get_args(Status))
    _text("summary", finding.summary)
    if not finding.summary.strip():
        raise ValueError("summary is empty")
    for name in ("analyzer", "cause"):
        _text(name, getattr(finding, name))
    if not isinstance(finding.advice, str) or not _ANCHOR.fullmatch(finding.advice):
        raise ValueError(f"advice {_shown(finding.advice)} is not an anchor of a page")
    if not isinstance(finding.ranks, tuple) or not all(_is_whole(rank) and rank >= 0 for rank in finding.ranks):
        raise ValueError(f"ranks {_shown(finding.ranks)} is not a tuple of ranks")
    for name in ("first_step", "last_step", "attempt"):
        if (value := getattr(finding, name)) is not None and not _is_whole(value):
            raise ValueError(f"{name} {_shown(value)} is not a whole number")
    cost = finding.cost_s
    if cost is not None and (isinstance(cost, bool) or not isinstance(cost, (int, float)) or not math.isfinite(cost)):
        raise ValueError(f"cost_s {_shown(cost)} is not a number of seconds")
    evidence = _evidence(finding.evidence)
    return returned.to_json() | {"evidence": evidence, "summary": " ".join(finding.summary.split())}


def _evidence(evidence: Any) -> dict[str, Any]:
    if not isinstance(evidence, Mapping):
        raise TypeError(f"evidence is a {type(evidence).__name__}, not a mapping")
    numbers = {key: _plain(value, str(key)) for key, value in evidence.items() if _is_key(key)}
    if (size := len(json.dumps(numbers))) > MAX_EVIDENCE_BYTES:
        raise ValueError(f"evidence has {size:,} bytes, more than {MAX_EVIDENCE_BYTES:,}")
    return numbers


def _is_key(key: Any) -> bool:
    if isinstance(key, str):
        return True
    raise TypeError(f"a name in evidence is a {type(key).__name__}, not a string")


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Convert the value to JSON's types; numpy's numbers become Python's. Raises TypeError for a value of any other
    type, and ValueError for a value that is nested too deeply.
    """
    if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > 8:
        raise ValueError(f"evidence {where} is nested too deeply")
    if isinstance(value, Mapping):
        return {key: _plain(item, where, depth + 1) for key, item in value.items() if _is_key(key)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise TypeError(f"evidence {where} is a {type(value).__name__}, which JSON cannot hold")


def checked_kinds(declared: Any, builtin: Collection[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the kinds as fields of `Kind`, and why others are not used."""
    accepted: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for kind in declared:
        try:
            name = kind.name
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(f"the kind {_shown(name)} must have a name of letters, digits and _")
            if name in builtin:
                raise ValueError(f"the kind {name} is one of Rankscope's, and cannot be replaced")
            _text("title", kind.title)
            identity = tuple(kind.identity)
            if unknown := [one for one in identity if one not in _FIELDS and not str(one).startswith("evidence.")]:
                raise ValueError(f"the kind {name} is identified by {_shown(unknown[0])}, which findings do not have")
        except (AttributeError, TypeError, ValueError) as error:
            problems.append(str(error))
            continue
        accepted[name] = {
            "name": name, "title": " ".join(kind.title.split()) or name, "identity": identity,
            "may_last": bool(kind.may_last), "at_end": bool(kind.at_end), "may_be_hardware": bool(kind.may_be_hardware),
            "user_causes": sorted(map(str, kind.user_causes)),
        }  # fmt: skip
    return list(accepted.values()), problems


def _one_of(name: str, value: Any, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} {_shown(value)} is not one of {', '.join(known)}")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}, not a string")
    if len(value) > MAX_TEXT_CHARS:
        raise ValueError(f"{name} has {len(value):,} characters, more than {MAX_TEXT_CHARS:,}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:60]
    except Exception:  # the value comes from a plug-in, so its `__repr__` may raise anything
        return f"a {type(value).__name__}"
