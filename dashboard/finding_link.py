"""Open the page of a finding from any other page."""

from __future__ import annotations

import streamlit as st

__all__ = ["FINDINGS_PAGE", "PAGES_BY_TITLE", "open_finding", "open_page"]

FINDINGS_PAGE = "findings_page"
"""Key of the page in the session state; set by `dashboard.navigation`."""

PAGES_BY_TITLE = "pages_by_title"
"""All pages, there too."""


def open_page(title: str, **address: str | list[str]) -> None:
    """Go to a page, with parts of its address."""
    st.switch_page(st.session_state[PAGES_BY_TITLE][title], query_params=address)


def open_finding(run_id: str, finding_id: str) -> None:
    """Go to the page that shows a finding."""
    st.switch_page(st.session_state[FINDINGS_PAGE], query_params={"run": run_id, "finding": finding_id})
