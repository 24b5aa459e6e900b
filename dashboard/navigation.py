"""The pages, in the order of the sidebar: first what is wrong, then where, then why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from .views import (
    checkpoints,
    collectives,
    compare,
    findings,
    goodput,
    health,
    memory,
    numerics,
    overview,
    pipeline,
    ranks,
    sql,
    timeline,
)

__all__ = ["open_finding", "pages"]


def pages() -> dict[str, list[Any]]:
    """Sections and their pages for `st.navigation`; made anew in each run of the script, as Streamlit wants it."""
    first, *others = [
        [_page(place) for place in places]
        for places in (
            [(overview.overview, "Overview", "monitor_heart"), (findings.findings, "Findings", "report"),
             (goodput.goodput, "Goodput", "donut_small")],
            [(ranks.ranks, "Ranks", "grid_on"), (timeline.timeline, "Timeline", "view_timeline"),
             (collectives.collectives, "Collectives", "hub"), (pipeline.pipeline, "Pipeline", "conversion_path")],
            [(numerics.numerics, "Numerics", "show_chart"), (memory.memory, "Memory", "memory"),
             (health.health, "Health", "device_thermostat"), (checkpoints.checkpoints, "Recovery", "restore")],
            [(compare.compare, "Compare runs", "compare_arrows"), (sql.sql, "SQL", "terminal")],
        )
    ]  # fmt: skip
    sections = dict(zip(("Run", "Ranks and time", "State", "Ask"), (first, *others), strict=True))
    st.session_state["findings_page"] = sections["Run"][1]
    return sections


def _page(place: tuple[Callable[[], None], str, str]) -> Any:
    body, title, icon = place
    return st.Page(
        body, title=title, icon=f":material/{icon}:", url_path=title.lower().replace(" ", "-"),
        default=title == "Overview",
    )  # fmt: skip


def open_finding(run_id: str, finding_id: str) -> None:
    """Go to the page that shows a finding."""
    st.switch_page(st.session_state["findings_page"], query_params={"run": run_id, "finding": finding_id})
