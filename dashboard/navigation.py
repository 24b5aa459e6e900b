"""The pages in the order of the sidebar: what is wrong, then where, then why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st
from streamlit.components import v2

from dashboard.data.prefetch import Query
from dashboard.data.sql import queries
from dashboard.page_link import PAGES_BY_TITLE
from dashboard.views import (
    checkpoints,
    collectives,
    compare,
    configuration,
    events,
    findings,
    fleet,
    goodput,
    health,
    home,
    logs,
    memory,
    numerics,
    overview,
    pipeline,
    ranks,
    runbook,
    sql,
    system,
    timeline,
)

__all__ = ["FIRST_QUERIES", "pages"]

_SECTIONS = "page_sections"
"""Session-state key of the sections."""
FIRST_QUERIES: tuple[Query, ...] = (
    (overview.load_lines, ()),
    (ranks.load_matrix, ("own work", True)),
    (ranks.load_ranks, ()),
    (memory.load_memory, ()),
    (numerics.load_numerics, ()),
    (queries.extent, ()),
    (collectives.load_calls, ()),
    (pipeline.load_members, ()),
    (checkpoints.load_timeline, (None,)),
    (health.load_health, ()),
    (events.load_kinds, ()),
    (system.load_system, ()),
    (ranks.load_matrix, ("step time", True)),
)
"""The first queries of the pages, prefetched for a large run."""


_closing = v2.component(
    "rankscope_menu",
    html="<span></span>",
    js="""
export default function () {  // on a phone the sidebar covers the page, and would stay open after a link is followed
  window.rankscopeMenu ??= document.addEventListener("click", (event) => {
    if (innerWidth <= 768 && event.target.closest(".st-key-menu a"))
      document.querySelector("[data-testid=stSidebarCollapseButton] button")?.click();
  }) ?? true;
  if (window.rankscopeHistory) return;
  // When a link leaves a page with a filter in its address, Streamlit first adds an address of the old page with the
  // new page's parameters. Back would lead to it, and the table of runs would be the Overview.
  const push = window.rankscopeHistory = history.pushState;
  let next = location.pathname;
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-testid^=stPageLink] a[href]");
    const isHere = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
    next = link && isHere ? new URL(link.href).pathname : location.pathname;
  }, true);
  window.addEventListener("popstate", () => { next = location.pathname; });
  history.pushState = (state, title, address) => {
    const path = new URL(address, location).pathname;
    if (path === location.pathname && next !== path) return;
    next = path;
    push.call(history, state, title, address);
  };
}
""",
    isolate_styles=False,
)


def pages() -> dict[str, list[Any]]:
    """Sections and their pages for `st.navigation`, created in each run of the script, as Streamlit requires.

    Streamlit's menu is hidden, because its links would not name the run.
    """
    first, *others = [
        [_page(*entry) for entry in entries]
        for entries in (
            [(home.home, "Runs", "list"), (fleet.fleet, "Fleet", "device_hub"),
             (runbook.runbook, "Runbook", "menu_book")],
            [(overview.overview, "Overview", "monitor_heart"), (findings.findings, "Findings", "report"),
             (goodput.goodput, "Goodput", "donut_small")],
            [(ranks.ranks, "Ranks", "grid_on"), (timeline.timeline, "Timeline", "view_timeline"),
             (collectives.collectives, "Collectives", "hub"), (pipeline.pipeline, "Pipeline", "conversion_path")],
            [(numerics.numerics, "Numerics", "show_chart"), (memory.memory, "Memory", "memory"),
             (health.health, "Health", "device_thermostat"), (checkpoints.checkpoints, "Recovery", "restore")],
            [(logs.logs, "Logs", "article"), (events.events, "Events", "event_note"),
             (configuration.configuration, "Configuration", "tune"), (system.system, "System", "dns")],
            [(compare.compare, "Compare runs", "compare_arrows"), (sql.sql, "SQL", "terminal")],
        )
    ]  # fmt: skip
    sections = dict(
        zip(("All runs", "Run", "Ranks and time", "State", "Records", "Query"), (first, *others), strict=True)
    )
    st.session_state[PAGES_BY_TITLE] = {page.title: page for pages in sections.values() for page in pages}
    st.session_state[_SECTIONS] = sections
    return sections


def links(run_id: str | None) -> None:
    """Draw the menu in the sidebar. The address of each link names the run, so that it can be copied."""
    with st.sidebar, st.container(key="menu", gap=None):
        for section, pages_of_section in st.session_state[_SECTIONS].items():
            st.caption(section)
            for page in pages_of_section:
                of_run = {"run": run_id} if run_id is not None and section != "All runs" else None
                st.page_link(page, query_params=of_run, width="stretch")
    with st.container(key="menu-closing"):  # hidden by the style sheet
        _closing(key="menu-closing-script")


def _page(body: Callable[[], None], title: str, icon: str) -> Any:
    return st.Page(
        body, title=title, icon=f":material/{icon}:", url_path=title.lower().replace(" ", "-"),
        default=title == "Runs",
    )  # fmt: skip
