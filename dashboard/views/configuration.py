"""Page on the configuration: all settings of the run, how it was started, and the faults to inject."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import streamlit as st

from analyzers.run.records.event_log import parsed_detail
from analyzers.source import Source
from dashboard.data.flat_settings import flat
from dashboard.drawing.elements import empty_state, table
from dashboard.frame import View, framed
from probes.tape import event_kinds
from probes.tape.event_kinds import COMMON_FIELDS
from probes.tape.redaction.printable import visible

__all__ = ["configuration"]


def load_framework_settings(source: Source) -> dict[str, Any]:
    """Hyperparameters that the attached framework reported; empty without a framework."""
    if not source.has("events"):
        return {}
    rows = source.rows(
        "SELECT CAST(detail AS VARCHAR) FROM events WHERE kind = ? ORDER BY wall_ns", [event_kinds.SETTINGS]
    )
    found: dict[str, Any] = {}
    for (detail,) in rows:
        found |= {name: value for name, value in parsed_detail(detail).items() if name not in COMMON_FIELDS}
    return found


@framed("Configuration")
def configuration(view: View) -> None:
    """Draw the command, a filter and the settings."""
    manifest = view.manifest
    if not manifest:
        empty_state("`run.json` of this run is missing or damaged.", "The configuration is not known.")
    _started(manifest)
    framework = view.ask(load_framework_settings)
    if framework is None:
        return
    settings = flat(manifest.get("config")) + [("(framework)", name, value) for _, name, value in flat(framework)]
    if not settings:
        empty_state(
            "No settings are recorded with this run.",
            "`rankscope train` records all of its settings. For an attached script, only settings passed by a "
            "framework's callback are recorded.",
        )
        return
    text = (
        st.text_input("Filter", key="setting", placeholder="part of a name or value", width=320, bind="query-params")
        or ""
    ).lower()
    shown = [row for row in settings if text in f"{row[0]}.{row[1]} {row[2]}".lower()]
    if not shown:
        empty_state("No setting matches the filter.")
        return
    table(
        dict(zip(("section", "setting", "value"), zip(*shown, strict=True), strict=True)), key="settings",
        height=min(760, 36 + 33 * len(shown)),
        column_config={"section": st.column_config.Column(pinned=True, width=90)},
    )  # fmt: skip
    st.caption(f"{len(shown):,} of {len(settings):,} settings, defaults included. Secrets are not part of `run.json`.")


def _started(manifest: Mapping[str, Any]) -> None:
    command, faults = manifest.get("command"), manifest.get("faults")
    if isinstance(command, list) and command:
        st.caption("Command")
        st.code(visible(shlex.join(map(str, command)))[:4_000], language=None, wrap_lines=True)
    if manifest.get("cwd"):
        st.caption("Working directory")
        st.code(visible(str(manifest["cwd"]))[:1_000], language=None, wrap_lines=True)
    if isinstance(faults, list) and faults:
        st.caption("Faults injected into this run")
        st.code("\n".join(visible(str(fault)[:500]) for fault in faults[:100]), language=None, wrap_lines=True)
