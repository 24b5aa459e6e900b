"""Choice of the run: the page's address names it, and the list in the sidebar changes the address.

    run_id = choose_run(folder, folder.run_ids())      # draws the list; the address names the run from then on

Only the address holds the choice. A choice that was stored in the session would be out of date after Back or a link.
"""

from __future__ import annotations

import os

import streamlit as st

from dashboard.frame import RUN_ID, current_run
from probes.tape.redaction.printable import visible
from store.runs_folder import RunsFolder

__all__ = ["choose_run"]

CHOICE_KEY = "run_choice"
"""Session-state key of the list in the sidebar."""


def choose_run(folder: RunsFolder, names: list[str]) -> str | None:
    """Draw the list of `names`, and return the run in the address. Without one, return the first of these that exists:
    the run shown last, the run with which the dashboard was started, the newest run.

    Returns None if the address names a missing run: showing another run instead would mislead.
    """
    asked, before = st.query_params.get("run"), current_run()
    chosen = _resolved(folder, names, asked)
    if chosen is None and not asked:
        started_on = os.environ.get("RANKSCOPE_DASHBOARD_RUN")
        chosen = _resolved(folder, names, before) or _resolved(folder, names, started_on) or names[0]
    st.session_state[CHOICE_KEY] = chosen
    with st.sidebar:
        st.selectbox(
            "Run", names, key=CHOICE_KEY, format_func=visible, help="The newest run is on top.",
            on_change=_into_address, placeholder="Choose a run",
        )  # fmt: skip
    if chosen is None:
        return None
    if chosen != before:
        st.session_state[RUN_ID] = chosen
        st.session_state["polls"] = True
    if asked != chosen:
        st.query_params["run"] = chosen
    return chosen


def _into_address() -> None:
    """Write the choice to the address, and remove the former run's finding from it."""
    if "finding" in st.query_params:
        del st.query_params["finding"]
    st.query_params["run"] = st.session_state[CHOICE_KEY]


def _resolved(folder: RunsFolder, names: list[str], run_id: str | None) -> str | None:
    """Return the id if it is in the list (which is read once per page); for `latest`, the run that it links to."""
    if not run_id or run_id in names:
        return run_id or None
    found = folder.resolved(run_id)
    return found if found in names else None
