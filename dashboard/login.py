"""Login of the dashboard with one token for all visitors, where the server was started with `--token-file`.

    login.require()          # first in the script: without the token nothing below it runs

The token is typed into a form and compared in the server's process; a session that has shown it stays logged in until
its page is closed. It never stands in an address. A wrong one costs all visitors a second, so it cannot be guessed.
"""

from __future__ import annotations

import hmac
import os
import stat
import threading
import time
from pathlib import Path

import streamlit as st

from dashboard.launch import TOKEN_VARIABLE
from probes.tape.safe_open import read_plain

__all__ = ["MIN_CHARS", "VARIABLE", "read_token", "require"]

VARIABLE = TOKEN_VARIABLE
MIN_CHARS = 16
MAX_BYTES = 4096
WRONG_S = 1.0
_checking = threading.Lock()


def read_token(path: Path) -> str:
    """The token of a file. Raises ValueError for one that others may read, or that is too short to be safe."""
    try:
        token = read_plain(path, MAX_BYTES).decode("utf-8", "replace").strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(f"{path}: other users can read it; chmod 600 {path}")
    if len(token) < MIN_CHARS:
        raise ValueError(f"{path}: holds {len(token)} characters; a token needs {MIN_CHARS}, e.g. openssl rand -hex 16")
    return token


def require() -> None:
    """Show the form and stop the script, unless there is no token or this session has shown it."""
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
        st.error("This is not the token.")
    st.stop()


def _is_right(given: str) -> bool:
    try:
        token = read_token(Path(os.environ[VARIABLE]))
    except ValueError:
        return False  # the file has changed since the start: nobody is let in
    with _checking:
        if hmac.compare_digest(given.strip().encode(), token.encode()):
            return True
        time.sleep(WRONG_S)
    return False
