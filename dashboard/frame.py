"""Frame of all pages: the run, its state, the age of its last record, and errors in place of a traceback.

    @framed("Ranks")
    def ranks(view: View) -> None:
        answer = view.ask(load_ranks, measure)      # None: a message was drawn, there are no data yet
        ...

The body is a fragment: while the run is alive or a query is running, only the body runs, every `POLL_S` seconds. Parts
with a slow query show a message, and the other parts are drawn immediately. When a result arrives, the page is drawn
again; unchanged charts come from a cache (`cached_figure`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from analyzers.diagnose import Diagnosis
from analyzers.run.live.state import RunState
from dashboard.data.background_answers import Answer, Answers
from dashboard.data.prefetch import prefetch
from dashboard.data.run_access import FIRST_S, RunAccess
from dashboard.drawing import units
from dashboard.drawing.elements import BadgeColour, empty_state, markdown_text
from probes.tape.format.reader import TapeError
from probes.tape.rundir import RunDir, RunError
from store import StoreBusyError, StoreError
from store.runs_folder import RunsFolder

__all__ = [
    "IDLE_S", "POLL_S", "RUN_ID", "View", "access_to", "current_run", "framed", "runs_folder", "shared_answers",
]  # fmt: skip

RUN_ID = "run_id"
"""Session-state key of the run that the page shows."""
PATIENCE_S = 0.6
"""Seconds that a page waits for its first answers before it is drawn without them."""
POLL_S = 2.0
IDLE_S = 15.0
"""Seconds between polls of an ended run, which may be resumed."""
OLD_S = 15.0
"""Age of the last record (seconds) above which it is shown in orange while the run is alive."""
_STATE_COLOURS: dict[str, BadgeColour] = {
    "training": "green", "starting": "blue", "stalled": "red", "recovering": "orange", "finished": "gray",
    "preempted": "gray", "interrupted": "gray", "died": "red", "failed": "red", "given up": "red", "fenced": "gray",
}  # fmt: skip
_STATE_ICONS = {
    "training": ":material/play_circle:", "starting": ":material/hourglass_top:", "stalled": ":material/pause_circle:",
    "recovering": ":material/autorenew:", "finished": ":material/check_circle:", "died": ":material/dangerous:",
    "failed": ":material/dangerous:", "given up": ":material/dangerous:",
}  # fmt: skip


@st.cache_resource(show_spinner=False)
def shared_answers() -> Answers:
    """Answers shared by all visitors."""
    return Answers()


@st.cache_resource(show_spinner=False, max_entries=256)
def _access(path: str) -> RunAccess:
    from pathlib import Path

    return RunAccess(RunDir(Path(path)), shared_answers())


def access_to(run: RunDir) -> RunAccess:
    """The shared access to a run."""
    return _access(str(run.path))


def runs_folder() -> RunsFolder:
    """Folder that the dashboard was started on."""
    folder: RunsFolder = st.session_state["runs_folder"]
    return folder


def current_run() -> str | None:
    """Id of the selected run."""
    chosen: str | None = st.session_state.get(RUN_ID)
    return chosen


@dataclass(slots=True, kw_only=True)
class View:
    """A page's access to the run: its state, and queries."""

    access: RunAccess
    state: RunState
    is_pending: bool = False
    manifest: dict[str, Any] = field(default_factory=dict)
    awaited: list[Future[None]] = field(default_factory=list)
    """Running queries that a part of the page is waiting for."""
    until: float = field(default_factory=lambda: time.monotonic() + PATIENCE_S)
    """Deadline (monotonic) for first answers; later answers are drawn later."""

    @property
    def patience_s(self) -> float:
        """Seconds left until the deadline."""
        return max(0.0, self.until - time.monotonic())

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.access.run.run_id

    def ask(self, load: Callable[..., Any], *parameters: Hashable, often: bool = False) -> Any:
        """Return `load(store, *parameters)` for the run, or draw a message why there is no result yet and return None.

        `often`: a quick query for live values, repeated with shorter pauses.
        """
        answer = self.access.ask(load, *parameters, first_s=min(FIRST_S, self.patience_s), often=often)
        if answer.error is not None:
            _cannot_read(answer.error, has_former=answer.value is not None)
            self.is_pending = True
        elif answer.value is None:
            empty_state(
                "Computing from the records…", "The first time takes longer for a run with many ranks and steps."
            )
            self.expect(answer)
        elif not answer.is_fresh:
            self.is_pending = True
        return answer.value

    def diagnosis(self) -> Diagnosis | None:
        """The newest diagnosis; None while the first one is computed."""
        answer = self.access.diagnosis(first_s=min(FIRST_S, self.patience_s))
        if answer.value is None:
            self.expect(answer)
        self.is_pending |= not answer.is_fresh
        return answer.value if isinstance(answer.value, Diagnosis) else None

    def expect(self, answer: Answer) -> None:
        """Draw the page again when this answer has arrived."""
        self.is_pending = True
        if answer.pending is not None:
            self.awaited.append(answer.pending)


def framed(title: str) -> Callable[[Callable[[View], None]], Callable[[], None]]:
    """Decorate a function that draws a View as a page."""

    def decorate(body: Callable[[View], None]) -> Callable[[], None]:
        @functools.wraps(body)
        def page() -> None:
            _page(title, body)

        return page

    return decorate


def _page(title: str, body: Callable[[View], None]) -> None:
    run_id = current_run()
    if run_id is None:
        return
    try:
        access = access_to(runs_folder().open(run_id))
    except RunError as error:
        st.title(title, anchor=False)
        _cannot_read(error)
        _retry(run_id)
        return
    polls = st.session_state.get("polls", True)

    def draw() -> None:
        if not access.run.path.is_dir():  # deleted or renamed since: its former answers would be drawn as an empty run
            st.rerun()
        answer = access.state()
        view = _view(access, answer)
        _head(title, access, view)
        if view is None:
            _no_state_yet(answer)
            pending, live = True, False
            if answer.pending is not None and _has_arrived([answer.pending]):
                st.rerun()
        else:
            try:
                body(view)
            except (StoreError, TapeError, RunError) as error:
                _cannot_read(error)
                view.is_pending = True
            pending, live = view.is_pending, view.state.is_live
            if _has_arrived(view.awaited):
                st.rerun()
            if not view.awaited:
                prefetch(access)
        if (pending or live) != polls:
            st.session_state["polls"] = pending or live
            st.rerun()

    # The key contains the run's id, so that each run has a separate fragment state.
    st.fragment(draw, run_every=POLL_S if polls else IDLE_S, key=f"{title}-{run_id}")()


@st.fragment(run_every=POLL_S)
def _retry(run_id: str) -> None:
    """Draw the page again when the run can be opened."""
    try:
        runs_folder().open(run_id)
    except RunError:
        return
    st.rerun()


def _has_arrived(awaited: list[Future[None]]) -> bool:
    """Wait for one of the results until the next poll, while the browser shows the rest of the page."""
    slot, until = st.empty(), time.monotonic() + POLL_S
    while awaited and time.monotonic() < until:
        if wait(awaited, timeout=0.1, return_when=FIRST_COMPLETED).done:
            return True
        slot.caption("Loading more…")  # here Streamlit handles a click that happened in the meantime
    return False


def _view(access: RunAccess, answer: Answer) -> View | None:
    """View of the run with its state; None while there is no state."""
    if answer.value is None:
        return None
    return View(
        access=access, state=answer.value, is_pending=answer.error is not None, manifest=access.manifest()
    )  # fmt: skip


def _no_state_yet(answer: Answer) -> None:
    """Draw a message that the run is being read, or why it cannot be read."""
    if answer.error is not None:
        _cannot_read(answer.error)
    else:
        empty_state("Reading the run…", "The records of many ranks take a while the first time.")


def _head(title: str, access: RunAccess, view: View | None) -> None:
    """Draw the title on the left and the run's state on the right."""
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute", key="head"):
        st.title(title, anchor=False, width="content")
        if view is None:
            return
        state = view.state
        with st.container(horizontal=True, vertical_alignment="center", width="content", gap="small"):
            colour, icon = _STATE_COLOURS.get(state.word, "gray"), _STATE_ICONS.get(state.word)
            st.badge(markdown_text(state.word, 30), color=colour, icon=icon, help="State")
            st.markdown(f"**{markdown_text(access.run.run_id, 60)}**", width="content")
            if since := _since(state):
                st.markdown(since, width="content")
    reason = st.empty()
    if state.reason and state.word != "finished":
        reason.caption(markdown_text(state.reason, 300))


def _since(state: RunState) -> str:
    if state.last_ns is None:
        return ":gray[no record yet]"
    if state.word == "stalled":  # the newest record is of `watch`; the reason says how long the ranks have been silent
        return ""
    old_s = max(0.0, time.time() - state.last_ns / 1e9)
    text = f"last record {units.age(old_s)} ago"
    return f":orange[{text}]" if state.is_live and old_s > OLD_S else f":gray[{text}]"


def _cannot_read(error: Exception, *, has_former: bool = False) -> None:
    """Draw an error in place of a traceback."""
    if isinstance(error, StoreBusyError):
        heading = "Another process has the store open"
        hint = "The page tries again. Close the program that has it open (a DuckDB shell without -readonly?)."
    elif isinstance(error, (StoreError, TapeError, RunError)):
        heading, hint = "This run cannot be read", "Choose another run in the list on the left."
    else:
        heading = "This page could not be computed"
        hint = "The other pages work. Please report this with the run's files."
    if has_former:
        heading += ". Older data are shown"
    with st.container(border=True):
        st.markdown(f":orange[:material/warning: **{heading}**]")
        st.text(f"{'' if isinstance(error, ValueError) else type(error).__name__ + ': '}{str(error)[:1000]}")
        st.caption(hint)
