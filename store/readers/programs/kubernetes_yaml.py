"""Read Kubernetes objects as YAML (`kubectl get events`, `pod` with `-o yaml`) in the same way as their JSON.

Only what kubectl writes is parsed: nested blocks, quoted and multi-line texts. Tags, anchors and aliases are not
supported, so their risks do not arise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.readers.programs.kubernetes_objects import lines_of
from store.readers.programs.text import read_text
from store.readers.untrusted.external_files import REPORT_BYTES, SourceError

NAME = "events or pods of Kubernetes as YAML"
MAX_DEPTH = 60
_KIND = re.compile(rb"(?m)^(?:- )? *kind: (?:Pod|PodList|Event|EventList|List)\s*$")
_KEY = re.compile(r'("[^"]*"|\S+?):(?:\s+(.*))?$')
_BLOCK = re.compile(r"[|>][+-]?\d?$")
_CONSTANTS: dict[str, Any] = {"null": None, "~": None, "{}": {}, "[]": [], "true": True, "false": False}


def recognise(first: bytes) -> bool:
    """Return True for a list of objects, an event or a pod."""
    start = first.removeprefix(b"---\n")
    return start.startswith((b"apiVersion: ", b"items:")) and _KIND.search(first) is not None


def lines(path: Path) -> Iterator[str]:
    """Yield the log lines of all objects. Raises SourceError if they are nested too deeply."""
    items: list[dict[str, Any]] = []
    for document in re.split(r"(?m)^---\s*$", read_text(path, REPORT_BYTES)):
        rows = [(len(row) - len(row.lstrip()), row.strip()) for row in document.splitlines()]
        whole = _Block([(depth, row) for depth, row in rows if row and not row.startswith("#")]).value(0)
        listed = whole.get("items") if isinstance(whole, dict) else None
        found = listed if isinstance(listed, list) else [whole]
        items += [item for item in found if isinstance(item, dict)]
    yield from lines_of(items)


@dataclass(slots=True)
class _Block:
    """Lines with their indentation. Reading begins at `at`."""

    rows: list[tuple[int, str]]
    at: int = 0

    def value(self, depth: int) -> Any:
        """Parse the list or mapping at the next line. All its lines have the indentation of that line."""
        if depth > MAX_DEPTH:
            raise SourceError(f"is nested more than {MAX_DEPTH} deep")
        if self.at >= len(self.rows):
            return None
        indent, row = self.rows[self.at]
        return self._list(indent, depth) if row[:2] in ("- ", "-") else self._map(indent, depth)

    def _list(self, indent: int, depth: int) -> list[Any]:
        found: list[Any] = []
        while self.at < len(self.rows) and self.rows[self.at][0] == indent and self.rows[self.at][1][:2] in ("- ", "-"):
            inside = self.rows[self.at][1][2:].strip()
            if _KEY.match(inside):
                self.rows[self.at] = (indent + 2, inside)
                found.append(self._map(indent + 2, depth + 1))
            else:
                self.at += 1
                found.append(_scalar(self._continued(inside, indent)))
        return found

    def _map(self, indent: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.at < len(self.rows) and self.rows[self.at][0] == indent:
            pair = _KEY.match(self.rows[self.at][1])
            if pair is None or self.rows[self.at][1].startswith("- "):
                break
            self.at += 1
            name, text = pair[1].strip('"'), (pair[2] or "").strip()
            if text and not _BLOCK.match(text):
                found[name] = _scalar(self._continued(text, indent))
            elif text:
                found[name] = self._continued("", indent)
            elif self.at < len(self.rows) and (
                self.rows[self.at][0] > indent
                or (self.rows[self.at][0] == indent and self.rows[self.at][1].startswith("- "))
            ):
                found[name] = self.value(depth + 1)
            else:
                found[name] = None
            while self.at < len(self.rows) and self.rows[self.at][0] > indent:
                self.at += 1  # skip what cannot be parsed
        return found

    def _continued(self, text: str, indent: int) -> str:
        """A text with the lines below it that are indented further."""
        parts = [text]
        while self.at < len(self.rows) and self.rows[self.at][0] > indent:
            parts.append(self.rows[self.at][1])
            self.at += 1
        return " ".join(parts).strip()


def _scalar(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text.startswith("'") and text.endswith("'") and len(text) > 1:
        return text[1:-1].replace("''", "'")
    if text.startswith('"'):
        try:
            return json.loads(text, strict=False)
        except ValueError:
            return text.strip('"')
    return int(text) if re.fullmatch(r"-?\d{1,15}", text) else text
