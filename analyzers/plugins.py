"""Plug-ins: kinds of findings and analyses from other installed packages.

    # pyproject.toml of the package
    [project.entry-points."rankscope.analyzers"]
    my_team = "my_team.rankscope_analyzers"

The entry point names a module with `KINDS` and `ANALYSES`, and optionally `WHY`, `NEXT` and `FIGURES` like the modules
`explain` and `figures` of our packages (docs/api.md). It runs in a separate process (`store.plugins`); this module
reads its description. Errors in the description are shown in the report; no built-in kind can be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from store.plugins import MAX_REASON_CHARS, PluginError, PluginProcess, plugins

__all__ = ["CHILD", "GROUP", "LIVE", "RECORDS", "InstalledPlugin", "installed", "plugin_of"]

GROUP = "rankscope.analyzers"
CHILD = "analyzers.plugin_calls.plugin_child"
"""Module that serves the calls in the plug-in's process."""
RECORDS = ("all", "sampled", "compared", "histories")
LIVE = ("never", "each_tick", "periodic")
MAX_NAME_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPlugin:
    """One plug-in, as it describes itself."""

    process: PluginProcess
    kinds: tuple[Mapping[str, Any], ...] = ()
    """Fields of `analyzers.kinds.Kind`, checked."""
    analyses: tuple[Mapping[str, Any], ...] = ()
    """`kinds`, `records`, `live` and `advises` of each `analyzers.analysis.Analysis`."""
    explains: Mapping[str, tuple[str, ...]]
    """For each of `WHY`, `NEXT` and `FIGURES`: the kinds that the plug-in covers there."""
    problems: tuple[str, ...] = ()
    """For each part of the plug-in that is not used, one line with the reason."""

    @property
    def name(self) -> str:
        """Name of the entry point."""
        return self.process.name


@cache
def installed() -> tuple[InstalledPlugin, ...]:
    """All plug-ins, sorted by name. Each is described once per process; a kind belongs to the first plug-in that
    declares it.
    """
    found: list[InstalledPlugin] = []
    taken: dict[str, str] = {}
    for process in plugins(GROUP, CHILD):
        try:
            described = process.call("describe", form=_description)
        except PluginError as error:
            found.append(InstalledPlugin(process=process, explains={}, problems=(str(error),)))
            continue
        repeated = [kind["name"] for kind in described["kinds"] if kind["name"] in taken]
        conflicts = (f"the kind {name} is already declared by plug-in {taken[name]}" for name in repeated)
        problems = [*described["problems"], *conflicts]
        kinds = tuple(kind for kind in described["kinds"] if kind["name"] not in taken)
        taken |= {kind["name"]: process.name for kind in kinds}
        analyses = tuple(described["analyses"])
        found.append(
            InstalledPlugin(
                process=process,
                kinds=kinds,
                analyses=analyses,
                explains=described["explains"],
                problems=tuple(problems),
            )
        )
    return tuple(found)


def _description(answer: Any) -> dict[str, Any]:
    """Parse the answer to `describe` from `analyzers.plugin_calls.plugin_child`. Raises an error if the answer is
    malformed.
    """
    kinds = [
        {
            "name": str(kind["name"]), "title": str(kind["title"]), "identity": [*map(str, kind["identity"])],
            **{flag: bool(kind[flag]) for flag in ("may_last", "at_end", "may_be_hardware")},
            "user_causes": [*map(str, kind["user_causes"])],
        }
        for kind in answer["kinds"]
    ]  # fmt: skip
    names = {str(kind["name"]) for kind in kinds}
    if not all(name.isidentifier() and name.isascii() and len(name) <= MAX_NAME_CHARS for name in names):
        raise ValueError("a kind must have a name of letters, digits and _")
    if any(one["live"] not in LIVE or one["records"] not in RECORDS for one in answer["analyses"]):
        raise ValueError("live or records has an unknown value")
    analyses = [
        {
            "number": int(one["number"]), "kinds": [kind for kind in one["kinds"] if kind in names],
            "records": str(one["records"]), "live": str(one["live"]), "advises": bool(one["advises"]),
        }
        for one in answer["analyses"]
    ]  # fmt: skip
    explains = {part: tuple(map(str, answer["explains"][part])) for part in ("WHY", "NEXT", "FIGURES")}
    problems = [" ".join(str(one).split())[:MAX_REASON_CHARS] for one in answer["problems"]]
    return {"kinds": kinds, "analyses": analyses, "explains": explains, "problems": problems}


def plugin_of(kind: str) -> InstalledPlugin | None:
    """The plug-in that declares a kind."""
    return next((one for one in installed() if any(known["name"] == kind for known in one.kinds)), None)
