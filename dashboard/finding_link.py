"""Open the page of a finding from any other page."""

from __future__ import annotations

import streamlit as st

__all__ = ["FINDINGS_PAGE", "open_finding"]

FINDINGS_PAGE = "findings_page"
"""Key of the page in the session state; set by `dashboard.navigation`."""


def open_finding(run_id: str, finding_id: str) -> None:
    """Go to the page that shows a finding."""
    st.switch_page(st.session_state[FINDINGS_PAGE], query_params={"run": run_id, "finding": finding_id})
