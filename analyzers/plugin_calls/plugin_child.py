"""Serve calls to one analyzer plug-in, in a separate process: describe, run, explain and draw.

python -m rankscope.plugin_process analyzers.plugin_calls.plugin_child rankscope.analyzers slow_save
"""

from __future__ import annotations

import json
from itertools import islice
from types import ModuleType
from typing import Any

from analyzers.finding import Finding
from analyzers.kinds import OUR_KINDS
from analyzers.plugin_calls.checked import checked_findings, checked_kinds
from analyzers.plugins import LIVE, RECORDS
from analyzers.scope import Scope
from store.plugins.child import Channel, Handlers, serve

__all__ = ["main"]

MAX_DRAWINGS = 8
MAX_SENTENCE_CHARS = 1_000


class _Calls:
    """The calls that `analyzers.plugins` and `analyzers.plugin_calls.calls` make."""

    def __init__(self, module: ModuleType, channel: Channel) -> None:
        if missing := [name for name in ("KINDS", "ANALYSES") if not hasattr(module, name)]:
            raise AttributeError(f"{module.__name__} has no {' and no '.join(missing)}")
        self._module, self._channel = module, channel
        self._analyses = tuple(module.ANALYSES)
        self._kinds, self._problems = checked_kinds(module.KINDS, OUR_KINDS)
        self._names = {kind["name"] for kind in self._kinds}

    def describe(self) -> dict[str, Any]:
        """Return the declared kinds and analyses, and why others cannot be used."""
        problems = list(self._problems)
        analyses = []
        for number, analysis in enumerate(self._analyses):
            declared = {
                "number": number, "kinds": [kind for kind in analysis.kinds if kind in self._names],
                "records": analysis.records, "live": analysis.live, "advises": bool(analysis.advises),
            }  # fmt: skip
            if not callable(analysis.run) or declared["records"] not in RECORDS or declared["live"] not in LIVE:
                problems.append(f"analysis {number}: run is not callable, or live or records has an unknown value")
            else:
                analyses.append(declared)
        tables = {part: [str(kind) for kind in self._table(part)] for part in ("WHY", "NEXT", "FIGURES")}
        return {"kinds": self._kinds, "analyses": analyses, "explains": tables, "problems": problems}

    def run(self, number: int, scope: Scope) -> dict[str, Any]:
        """Return the valid findings of one analysis, and why others were rejected."""
        found, refused = checked_findings(self._analyses[number].run(self._channel, scope), self._names)
        return {"findings": found, "refused": refused}

    def explain(self, part: str, finding: Finding) -> str:
        """Return the plug-in's sentence from `WHY` or `NEXT`."""
        text = self._table(part)[finding.kind](finding)
        if not isinstance(text, str):
            raise TypeError(f"{part} returned a {type(text).__name__}, not a string")
        return " ".join(text.split())[:MAX_SENTENCE_CHARS]

    def draw(self, finding: Finding) -> list[dict[str, Any]]:
        """The plug-in's figures as Plotly's JSON."""
        functions = self._table("FIGURES").get(finding.kind, ())
        found = (drawing for draw in functions for drawing in draw(self._channel, finding))
        return [
            {"title": str(drawing.title)[:MAX_SENTENCE_CHARS], "figure": json.loads(drawing.figure.to_json())}
            for drawing in islice(found, MAX_DRAWINGS)
        ]

    def _table(self, part: str) -> Any:
        return getattr(self._module, part, None) or {}


def _handlers(module: ModuleType, channel: Channel) -> Handlers:
    calls = _Calls(module, channel)
    return {"describe": calls.describe, "run": calls.run, "explain": calls.explain, "draw": calls.draw}


def main() -> None:
    """Serve until the parent process exits."""
    serve(_handlers)
