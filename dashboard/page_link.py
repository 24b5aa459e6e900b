"""Links from one page to another as real links: the address can be copied, and Back takes one step.

`st.switch_page` would first write the new page's address below the old page's path, to which Back would then lead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

__all__ = ["PAGES_BY_TITLE", "page_link"]

PAGES_BY_TITLE = "pages_by_title"
"""Key of all pages in the session state; set by `dashboard.navigation`."""


def page_link(
    title: str, label: str, icon: str, address: Mapping[str, Any], *, key: str, is_disabled: bool = False
) -> None:
    """Draw a link to another page, with the query parameters `address`."""
    with st.container(key=key, width="content"):
        st.page_link(
            st.session_state[PAGES_BY_TITLE][title], label=label, icon=f":material/{icon}:", disabled=is_disabled,
            query_params=dict(address),
        )  # fmt: skip
