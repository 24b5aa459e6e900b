"""The Streamlit script of the dashboard: choose the run and the page.

    rankscope dashboard runs/

Streamlit runs this file from top to bottom for each visitor and each click. The environment variable
RANKSCOPE_DASHBOARD_RUNS names the folder of runs. The page's address holds the state: `?run=<id>&finding=<id>`, and the
choices made on the page.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import streamlit as st

_HERE = Path(__file__).resolve().parent
# Streamlit puts this folder first on the path: there `pages` and `units` would be separate modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
if str(_HERE.parent) not in sys.path:
    sys.path.append(str(_HERE.parent))

from dashboard import frame, login, navigation  # noqa: E402
from dashboard.data import prefetch  # noqa: E402
from dashboard.drawing import live_chart  # noqa: E402
from dashboard.drawing.elements import markdown_text, style  # noqa: E402
from dashboard.run_choice import choose_run  # noqa: E402
from dashboard.views import findings, overview  # noqa: E402
from probes.tape.redaction.printable import visible  # noqa: E402
from store.runs_folder import RunsFolder  # noqa: E402


def main() -> None:
    """Run the script once."""
    st.set_page_config(page_title="Rankscope", page_icon=str(_HERE / "icon.png"), layout="wide")
    style()
    login.require()
    live_chart.prepare()
    prefetch.set_queries(navigation.FIRST_QUERIES)
    folder = RunsFolder(Path(os.environ.get("RANKSCOPE_DASHBOARD_RUNS", "runs")))
    st.session_state["runs_folder"] = folder
    names = folder.run_ids()
    if not names:
        _no_runs(folder)
        return
    page = st.navigation(navigation.pages(), position="hidden")
    # If the dashboard was started on one run, the first bare address shows that run; later it means the table of runs.
    starts_on_run = bool(os.environ.get("RANKSCOPE_DASHBOARD_RUN")) and frame.RUN_ID not in st.session_state
    is_home = page.url_path == "" and not {"run", "finding"} & set(st.query_params)
    if is_home and ("filter" in st.query_params or not starts_on_run):
        st.set_page_config(page_title="Runs · Rankscope")
        navigation.links(frame.current_run())
        page.run()
        return
    if page.title in ("Fleet", "Runbook"):  # pages that are not about a single run
        st.set_page_config(page_title=f"{page.title} · Rankscope")
        navigation.links(frame.current_run())
        page.run()
        return
    chosen = choose_run(folder, names)
    navigation.links(chosen)
    if chosen is None:
        _no_such_run(folder)
        return
    if page.url_path:
        st.set_page_config(page_title=markdown_text(f"{page.title} · {chosen}", 120))
        page.run()
    elif "finding" in st.query_params:
        # The short form of a link to a finding. The page is drawn here and not through a redirect, because the Back
        # button would then return to the short form, which redirects again.
        findings.findings()
    else:
        overview.overview()


def _no_such_run(folder: RunsFolder) -> None:
    st.title("No such run", anchor=False)
    asked = st.query_params.get("run", "")
    st.text(f"The address names {visible(asked[:200])}, which is not in {folder.path}. Choose a run on the left.")


def _no_runs(folder: RunsFolder) -> None:
    st.title("No runs yet", anchor=False)
    st.text(f"There is no run in {folder.path}.")
    st.markdown("Start a run, and it appears here:")
    st.code(f"rankscope train gpt-demo --set run.dir={shlex.quote(visible(str(folder.path)))}", language="bash")

    @st.fragment(run_every=frame.POLL_S)
    def wait() -> None:
        if folder.run_ids():
            st.rerun()

    wait()


main()
