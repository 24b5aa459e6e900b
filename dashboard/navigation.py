"""The pages, in the order of the sidebar: first what is wrong, then where, then why."""

from __future__ import annotations

from typing import Any

import streamlit as st

from .pages import findings, overview

__all__ = ["open_finding", "pages"]


def pages() -> dict[str, list[Any]]:
    """Sections and their pages for `st.navigation`; made anew in each run of the script, as Streamlit wants it."""
    sections = {
        "Run": [
            st.Page(overview.overview, title="Overview", icon=":material/monitor_heart:", default=True),
            st.Page(findings.findings, title="Findings", icon=":material/report:", url_path="findings"),
        ],
    }
    st.session_state["findings_page"] = sections["Run"][1]
    return sections


def open_finding(run_id: str, finding_id: str) -> None:
    """Go to the page that shows a finding."""
    st.switch_page(st.session_state["findings_page"], query_params={"run": run_id, "finding": finding_id})
