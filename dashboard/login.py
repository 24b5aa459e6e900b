"""Login with one token for all visitors, if the server was started with `--token-file`.

    login.require()          # first in the script: without the token nothing below it runs

The token is typed into a form and compared in the server; the session then stays logged in until its page is closed.
The token never appears in an address. A wrong token delays all visitors by a second, so it cannot be guessed.
"""

from __future__ import annotations

import hmac
import os
import threading
import time
from pathlib import Path

import streamlit as st

from dashboard.token_file import VARIABLE, read_token

__all__ = ["require"]

WRONG_S = 1.0
_checking = threading.Lock()


def require() -> None:
    """Show the form and stop the script, unless there is no token or this session has entered it."""
    if VARIABLE not in os.environ or st.session_state.get("is_logged_in") is True:
        return
    st.title("Rankscope", anchor=False)
    with st.form("login"):
        given = st.text_input("Token", type="password", key="login-token", autocomplete="off")
        is_sent = st.form_submit_button("Log in")
    if is_sent and _is_right(given):
        st.session_state["is_logged_in"] = True
        st.rerun()
    if is_sent:
        st.error("Wrong token.")
    st.stop()


def _is_right(given: str) -> bool:
    try:
        token = read_token(Path(os.environ[VARIABLE]))
    except ValueError:
        return False  # the token file has become invalid since the start, so every token is refused
    with _checking:
        if hmac.compare_digest(given.strip().encode(), token.encode()):
            return True
        time.sleep(WRONG_S)
    return False
