"""The Streamlit script of the dashboard: choose the run and the page.

    rankscope dashboard runs/

Streamlit runs this file from top to bottom for each visitor and each click. The folder of runs is in the variable
RANKSCOPE_DASHBOARD_RUNS; the run and the finding are in the address: `?run=<id>&finding=<id>`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import streamlit as st

_HERE = Path(__file__).resolve().parent
# Streamlit puts this folder first on the path: there `pages` and `units` would be modules of their own.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
if str(_HERE.parent) not in sys.path:
    sys.path.append(str(_HERE.parent))

from analyzers.printable import visible  # noqa: E402
from dashboard import frame, login, navigation  # noqa: E402
from dashboard.data import prefetch  # noqa: E402
from dashboard.drawing import live_chart  # noqa: E402
from dashboard.drawing.elements import style  # noqa: E402
from dashboard.finding_link import open_finding  # noqa: E402
from store.runs_folder import RunsFolder  # noqa: E402


def main() -> None:
    """One run of the script."""
    st.set_page_config(page_title="Rankscope", page_icon=str(_HERE / "icon.png"), layout="wide")
    style()
    login.require()
    live_chart.prepare()
    prefetch.use(navigation.FIRST_QUERIES)
    folder = RunsFolder(Path(os.environ.get("RANKSCOPE_DASHBOARD_RUNS", "runs")))
    st.session_state["runs_folder"] = folder
    names = folder.run_ids()
    if not names:
        _no_runs(folder)
        return
    if st.session_state.get("run_choice") not in names:
        st.session_state["run_choice"] = _run_of_address(folder) or names[0]
    page = st.navigation(navigation.pages(), expanded=True)
    with st.sidebar:
        chosen = st.selectbox("Run", names, key="run_choice", format_func=visible, help="The newest run is on top.")
    shown = st.session_state.get("run_id")
    if chosen != shown:
        if shown is not None and "finding" in st.query_params:  # of the former run
            del st.query_params["finding"]
        st.session_state["run_id"] = chosen
        st.session_state["polls"] = True
    finding = st.query_params.get("finding")
    if page.url_path == "" and finding:  # the short form of a finding's link
        open_finding(chosen, finding)
    if st.query_params.get("run") != chosen:
        st.query_params["run"] = chosen
    page.run()


def _run_of_address(folder: RunsFolder) -> str | None:
    """The run named in the address, else the one that the dashboard was started with, else the newest."""
    in_address = st.query_params.get("run")
    if in_address is not None:
        found = folder.resolved(in_address)
        if found is not None:
            return found
        st.toast("The address names a run that does not exist. The newest run is shown.", icon=":material/info:")
    return folder.resolved(os.environ.get("RANKSCOPE_DASHBOARD_RUN", "")) or folder.newest()


def _no_runs(folder: RunsFolder) -> None:
    st.title("No runs yet", anchor=False)
    st.text(f"There is no run in {folder.path}.")
    st.markdown("Start a run, and it appears here:")
    st.code("rankscope train examples/gpt-demo.toml", language="bash")

    @st.fragment(run_every=frame.POLL_S)
    def wait() -> None:
        if folder.run_ids():
            st.rerun()

    wait()


main()
