"""Read the configuration: a TOML file and `--set section.key=value`.

    config = load_config(Path("examples/gpt-demo.toml"), ["train.steps=50", "parallel.tp=2"])
    config.train.steps  # 50

A mistake of the user raises a `ConfigError` whose message is one line: the key, the value, what is allowed.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from probes.settings.plain_errors import in_words
from probes.tape.redaction.secrets import REDACTED, SECRET_SETTINGS, redacted_command
from trainer.config.config import Config
from trainer.config.export import AlertsConfig

__all__ = ["ConfigError", "changed_config", "check_trackers", "given_settings", "load_config", "usable_settings"]


class ConfigError(ValueError):
    """A mistake in the configuration; the message is one line for the user."""


def load_config(path: Path | None, overrides: list[str] | None = None) -> Config:
    """Read `path` (TOML; None = all defaults), apply `section.key=value` overrides in order, check everything.

    Raises ConfigError, one line, for an unreadable file, an unknown key, a wrong type or an impossible value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{path}: cannot read the configuration ({reason})") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {_one_line(str(error))}") from error
    for override in overrides or []:
        _apply_override(values, override)
    return _checked(values, path, overrides or ())


def given_settings(overrides: list[str]) -> dict[str, dict[str, Any]]:
    """Return {section: {key: value}} of `section.key=value` overrides only, validated like a configuration.

    Raises ConfigError, one line.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        _apply_override(values, override)
    config = _checked(values, None, overrides)
    check_trackers(config)
    checked = config.model_dump(mode="json")
    return {section: {name: checked[section][name] for name in settings} for section, settings in values.items()}


def changed_config(values: dict[str, Any], overrides: list[str]) -> Config:
    """Apply `section.key=value` overrides to a configuration from `run.json`. Raises ConfigError."""
    copied = {key: dict(section) if isinstance(section, dict) else section for key, section in values.items()}
    for override in overrides:
        _apply_override(copied, override)
    _refuse_redacted(copied)
    return _checked(copied)


def check_trackers(config: Config) -> None:
    """Raise ConfigError for a tracker that is not installed, which would otherwise fail silently in a child of
    `watch`.
    """
    for name in config.trackers.to:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"trackers.to = {name}: not installed. Run pip install 'rankscope[trackers]'.")


def usable_settings(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections without invalid settings, and one line for each invalid setting."""
    kept = {section: dict(given) if isinstance(given, dict) else given for section, given in values.items()}
    problems: list[str] = []
    while True:
        where: tuple[int | str, ...] = ()
        try:
            check_trackers(Config.model_validate(kept))
            return kept, problems
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            problem, where = _describe(first), first["loc"]
        except ConfigError as error:
            problem = str(error)
        problems.append(problem)
        _leave_out(kept, where, problem)


def _leave_out(values: dict[str, Any], where: tuple[int | str, ...], problem: str) -> None:
    """Remove the setting at `where`. If several settings were checked together, `problem` names them."""
    named = re.findall(r"\b(\w+)\.(\w+)", problem)
    for section, name in [where[:2], *named] if len(where) > 1 else named:
        table = values.get(section)
        if isinstance(table, dict) and name in table:
            del table[name]
            return
    values.pop(str(where[0]))


def _refuse_redacted(values: dict[str, Any]) -> None:
    """Drop redacted alerts of a run that lacks its `secrets.json`. Raises ConfigError for any other redacted
    setting.
    """
    for section, settings in values.items():
        for name, value in list(settings.items()) if isinstance(settings, dict) else []:
            if REDACTED not in str(value):
                continue
            if (section, name) not in SECRET_SETTINGS:
                raise ConfigError(
                    f"{section}.{name} was redacted, and secrets.json is missing: add --set {section}.{name}="
                )
            del settings[name]


def _checked(values: dict[str, Any], path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        first, *others = _joined_by_setting(error.errors(include_url=False))
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(_origin(first["loc"], path, overrides) + _describe(first) + more) from error


def _origin(where: tuple[int | str, ...], path: Path | None, overrides: Sequence[str]) -> str:
    """`--set ` or `my.toml: `, where the setting was given; empty if unknown, or if settings of both disagree."""
    given = {override.partition("=")[0].strip() for override in overrides}
    if ".".join(map(str, where[:2])) in given or (given and path is None):
        return "--set "
    return "" if path is None or (given and len(where) < 2) else f"{path}: "


def _joined_by_setting(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Join pydantic's errors about one value that may have several types: `true`, `false` or "auto"."""
    found: list[ErrorDetails] = []
    for error in errors:
        setting, kind = error["loc"][:2], error["loc"][2:3]
        if kind and re.match(r"(bool|int|float|str|literal\[.*)$", str(kind[0])):
            if found and found[-1]["loc"] == setting:
                found[-1]["msg"] += f" or {error['msg'].removeprefix('Input should be ')}"
                continue
            error["loc"] = setting
        found.append(error)
    return found


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not section or not name or "." in name:
        raise ConfigError(
            f"--set {redacted_command([override])[0]}: must look like section.key=value, for example train.steps=100"
        )
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} = {table!r}: is a section, not a value")
    table[name] = _parse_value(section, name, text.strip())


def _parse_value(section: str, name: str, text: str) -> Any:
    """Parse `text` as TOML, except that string fields take it verbatim (`run.name=007`, `schedule=1f1b`)."""
    info = Config.model_fields.get(section)
    field = info.annotation.model_fields.get(name) if info is not None else None  # type: ignore[union-attr]
    if field is not None and (field.annotation is str or get_origin(field.annotation) is Literal):
        return _unquoted(text)
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # `data.path=a.txt,b.txt` is what people type for a list.
        if field is not None and get_origin(field.annotation) is list:
            return [part.strip() for part in text.split(",") if part.strip()]
        return text


def _unquoted(text: str) -> str:
    """Remove one pair of quotes around the whole text; quotes within a command are kept."""
    is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]
    return text[1:-1] if is_quoted else text


def _describe(error: ErrorDetails) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":  # raised by a validator of ours, whose text in most cases names the key
        line = _one_line(str(error["ctx"]["error"]))
        return line if key in line else f"{key}: {line}"
    shown = REDACTED if _may_be_secret(error["loc"]) else _shown(error["input"])
    if error["type"] == "model_type":
        return f"{key} = {shown}: is a section, not a value"
    if error["type"] == "extra_forbidden":
        return f"{key} = {shown}: unknown key; {_allowed_names(error['loc'])}"
    if error["type"] == "string_pattern_mismatch":
        return f"{key} = {shown}: {_in_words(error['ctx']['pattern'])}"
    return f"{key} = {shown}: {_one_line(in_words(error['msg']))}"


def _in_words(pattern: str) -> str:
    if "://" not in pattern:
        return "must begin with a letter or digit and hold only these, '.', '_' and '-'"
    return (
        "must begin with http:// or https://"
        if "https?" in pattern
        else "must be a URL, for example s3://bucket/folder"
    )


def _may_be_secret(where: tuple[int | str, ...]) -> bool:
    """Return True for a secret setting, its section, and unknown keys in that section, which may be misspelt
    secrets.
    """
    public = {("alerts", name) for name in AlertsConfig.model_fields} - set(SECRET_SETTINGS)
    return where[:1] == ("alerts",) and where[:2] not in public


def _allowed_names(loc: tuple[int | str, ...]) -> str:
    fields = list(Config.model_fields)
    if len(loc) > 1:
        info = Config.model_fields[str(loc[0])]
        fields = list(info.annotation.model_fields)  # type: ignore[union-attr]
    near = difflib.get_close_matches(str(loc[-1]), fields, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"allowed are {', '.join(fields)}"


def _shown(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
