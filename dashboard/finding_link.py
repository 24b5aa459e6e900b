"""Links from one page to another: real ones, with an address that can be copied and one step of Back.

`st.switch_page` writes the new page's address below the old page's path first: Back would lead there.
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
    """Draw a link to another page, with parts of its address."""
    with st.container(key=key, width="content"):
        st.page_link(
            st.session_state[PAGES_BY_TITLE][title], label=label, icon=f":material/{icon}:", disabled=is_disabled,
            query_params=dict(address),
        )  # fmt: skip
