"""Redact secrets in a run's manifest, and in its texts before they are shared.

    redactor = Redactor.of(manifest)
    redactor("curl -H 'Authorization: Bearer abc123...'")      # "curl -H 'Authorization: (redacted)'"
    public, secrets = without_secrets(manifest)                # secrets: {"alerts.webhook": "https://..."}
    with_secrets(public, secrets)                              # the manifest again

A redactor removes the values of secret settings wherever they occur, values whose name marks them as secret, passwords
in URLs, and tokens of well-known forms (`secret_patterns`). A secret that looks like an ordinary word is not found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .secret_patterns import NAMES, REDACTED, redact_known_forms

__all__ = ["REDACTED", "SECRET_SETTINGS", "Redactor", "redacted_command", "with_secrets", "without_secrets"]

SECRET_SETTINGS = (("alerts", "webhook"), ("alerts", "command"))
"""Settings with values that may hold a token."""
MIN_LITERAL_CHARS = 8
"""Minimum length at which a secret setting's value is redacted in other texts; a shorter one (`mail`) is an ordinary
word."""
_SECRET_OPTION = re.compile(rf"(?i)--?{NAMES}")


@dataclass(frozen=True, slots=True)
class Redactor:
    """Replaces secrets in texts; `values` are literal secrets of the run's configuration."""

    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Redactor:
        """Make a redactor for a run's secret settings."""
        config = manifest.get("config")
        found = set()
        for section, key in SECRET_SETTINGS:
            settings = config.get(section) if isinstance(config, Mapping) else None
            value = settings.get(key) if isinstance(settings, Mapping) else None
            if isinstance(value, str) and len(value) >= MIN_LITERAL_CHARS:
                found.add(value)
        return cls(tuple(sorted(found, key=len, reverse=True)))

    def __call__(self, text: str) -> str:
        """The text without its secrets."""
        for value in self.values:
            text = text.replace(value, REDACTED)
        return redact_known_forms(text)

    def within(self, value: Any) -> Any:
        """Redact every text within lists and mappings. If a text's key names a secret, the whole text is redacted."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {key: self._named(str(key), item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.within, value)) if type(value) in (list, tuple) else value
        return value

    def _named(self, name: str, value: Any) -> Any:
        """Redact a value by its name: in `{"token": "abcd"}` the name alone marks a secret."""
        if isinstance(value, str) and value and self(f"{name}={value}") == f"{name}={REDACTED}":
            return REDACTED
        return self.within(value)


def without_secrets(
    manifest: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest with its secrets redacted, and the redacted settings as {dotted key: value}.

    `known`: redacted settings of an earlier call, which are kept for values that are already redacted.
    """
    redactor = Redactor.of(manifest)
    secrets: dict[str, Any] = {}

    def split(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in values.items():
            place = (*path, str(name))
            if isinstance(value, Mapping):
                found[name] = split(value, place)
                continue
            found[name] = _public(redactor, place, value)
            if value == found[name] and _is_redacted(value):
                if (key := ".".join(place)) in (known or {}):
                    secrets[key] = known[key]  # type: ignore[index]
            elif value != found[name]:
                secrets[".".join(place)] = value
        return found

    public = {key: redactor.within(value) for key, value in manifest.items() if key not in ("config", "command")}
    config, command = manifest.get("config"), manifest.get("command")
    if "config" in manifest:
        public["config"] = split(config, ()) if isinstance(config, Mapping) else config
    if "command" in manifest:
        is_list = isinstance(command, (list, tuple))
        public["command"] = redacted_command(list(command or ()), redactor) if is_list else redactor.within(command)
    return {key: public[key] for key in manifest}, secrets


def with_secrets(manifest: Mapping[str, Any], secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the settings that `without_secrets` removed."""
    found = dict(manifest)
    if not isinstance(config := manifest.get("config"), Mapping):
        return found

    def joined(values: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        return {
            name: joined(value, (*path, str(name)))
            if isinstance(value, Mapping)
            else secrets.get(".".join((*path, str(name))), value)
            for name, value in values.items()
        }

    found["config"] = joined(config, ())
    return found


def redacted_command(arguments: Sequence[Any], redactor: Redactor | None = None) -> list[Any]:
    """A command line without its secrets: `--api-key X`, `--api-key=X`, `--set alerts.webhook=X`, `TOKEN=X`."""
    redactor = redactor or Redactor()
    found: list[Any] = []
    is_value_of_secret = False
    for argument in arguments:
        if not isinstance(argument, str):
            found.append(argument)
            continue
        is_option = argument.startswith("-")
        key, equals, _ = argument.removeprefix("--set=").partition("=")
        if is_value_of_secret and not is_option:
            found.append(REDACTED)
        elif equals and tuple(key.strip().split(".")) in SECRET_SETTINGS:
            found.append(f"{argument[: argument.index(key)]}{key}={REDACTED}")
        else:
            found.append(redactor(argument))
        is_value_of_secret = is_option and not equals and bool(_SECRET_OPTION.fullmatch(argument))
    return found


def _public(redactor: Redactor, place: tuple[str, ...], value: Any) -> Any:
    """The form of a setting that may be shown."""
    if place in SECRET_SETTINGS:
        return REDACTED if value else value
    if place[-1].endswith("_file"):
        return value  # a path
    return redactor.within({place[-1]: value})[place[-1]]


def _is_redacted(value: Any) -> bool:
    return isinstance(value, (str, list, tuple)) and REDACTED in str(value)
