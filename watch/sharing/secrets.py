"""Redact secrets in texts of a run before the run leaves its owner's hands.

    redactor = Redactor.of(manifest)
    redactor("curl -H 'Authorization: Bearer abc123...'")      # "curl -H 'Authorization: (redacted)'"

Redacted are the values of secret settings wherever they occur, values whose name says that they are secret, passwords
in URLs, and tokens of well-known forms. No pattern finds a secret that looks like any other word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["REDACTED", "SECRET_SETTINGS", "Redactor"]

REDACTED = "(redacted)"
SECRET_SETTINGS = (("alerts", "webhook"), ("alerts", "command"))
"""Settings whose values may hold a token."""
MIN_VALUE_CHARS = 4
_NAMES = (
    r"[\w.-]*(?:pass(?:word|wd|phrase)|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?"
    r"|auth(?:orization)?)(?:_file)?"
)
_VALUE = r"[^\s\"'\\,;&<>()\[\]{}]"
_PATTERNS = (
    # NAME=value, "name": "value", name: value, --name value; numbers are settings, not secrets
    (
        re.compile(
            rf"(?i)(?<![\w-])(?P<keep>(?:--)?{_NAMES}(?![\w-])\\?[\"']?\s*[=:]\s*\\?[\"']?|--{_NAMES}\s+)"
            rf"(?:(?:bearer|basic|token)\s+)?(?!\d+(?:\.\d+)?(?:[^\w.]|$)|none\b|null\b|true\b|false\b|\(redacted\))"
            rf"{_VALUE}{{{MIN_VALUE_CHARS},}}"
        ),
        rf"\g<keep>{REDACTED}",
    ),
    (re.compile(rf"(?i)\b(?P<keep>(?:bearer|basic)\s+){_VALUE}{{12,}}"), rf"\g<keep>{REDACTED}"),
    (re.compile(r"(?P<keep>[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"), rf"\g<keep>{REDACTED}"),
    (re.compile(r"(?P<keep>https://hooks\.slack\.com/services/)[\w/-]+"), rf"\g<keep>{REDACTED}"),
    (
        re.compile(
            r"\b(?P<keep>)(?:AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|xox[abp]-[\w-]{10,}"
            r"|sk-[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
        ),
        rf"\g<keep>{REDACTED}",
    ),
)


@dataclass(frozen=True, slots=True)
class Redactor:
    """Replaces secrets in texts; `values` are literal secrets of the run's configuration."""

    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Redactor:
        """A redactor that knows the secret settings of a run."""
        config = manifest.get("config")
        found = []
        for section, key in SECRET_SETTINGS:
            settings = config.get(section) if isinstance(config, Mapping) else None
            value = settings.get(key) if isinstance(settings, Mapping) else None
            if isinstance(value, str) and len(value) >= MIN_VALUE_CHARS:
                found.append(value)
        return cls(tuple(sorted(found, key=len, reverse=True)))

    def __call__(self, text: str) -> str:
        """The text without its secrets."""
        for value in self.values:
            text = text.replace(value, REDACTED)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def within(self, value: Any) -> Any:
        """The same for every text within lists and mappings, by its name too."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {str(key): self._named(str(key), item) for key, item in value.items()}
        return [self.within(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _named(self, name: str, value: Any) -> Any:
        """A value with its name: `{"token": "abcd"}` is secret by the name alone."""
        if isinstance(value, str) and value and self(f"{name}={value}") == f"{name}={REDACTED}":
            return REDACTED
        return self.within(value)
