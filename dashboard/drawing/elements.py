"""Elements that all pages share: charts that keep their zoom, escaped text, tables, tiles, empty states.

    chart(loss.draw, curve, key="loss", what="Loss over the steps")
    st.markdown(markdown_text(finding.summary))
    empty_state("No collectives were recorded.", "They are, by default: see `probes` in the configuration.")

Text from a run (names, messages, summaries) reaches Streamlit through `markdown_text`, `st.text`, `st.code` or a table.
No page renders text of a run as HTML.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from analyzers.finding import Finding
from analyzers.wording import ranks_text
from dashboard.drawing import zoom
from dashboard.drawing.chart_cache import cached_figure
from dashboard.drawing.live_chart import show_in_place
from probes.tape.redaction.printable import escaped, visible, with_code

__all__ = [
    "SEVERITY_COLOURS", "BadgeColour", "chart", "empty_state", "is_dark_theme", "location", "markdown_text", "style",
    "table", "tiles", "unique_names", "with_runbook_links",
]  # fmt: skip

BadgeColour = Literal["red", "orange", "yellow", "blue", "green", "violet", "gray", "grey", "primary"]
SEVERITY_COLOURS: dict[str, BadgeColour] = {"critical": "red", "warning": "orange", "info": "blue"}
MAX_TEXT = 600
MAX_NAME = 80
MAX_ROWS_SHOWN = 14
"""Number of table rows visible without scrolling."""
_CHART = {
    "displaylogo": False,
    "showLink": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "scrollZoom": False,
    "doubleClick": False,  # the zoom is kept in the page's address, so only the page's own button may reset it
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d", "resetScale2d"],
    "toImageButtonOptions": {"format": "png", "scale": 2},
}
_EXPLAIN = re.compile(r"`rankscope explain ([a-z0-9_-]+)`")
_STYLE = """
<style>
[data-stale="true"], .stale-element { opacity: 1 !important; transition: none !important; }
[data-testid="stMainBlockContainer"] { padding: 2.6rem 2.2rem 2rem 2.2rem; max-width: 1760px; }
[data-testid="stHeader"] { background: transparent; }
h1 { padding: 0.4rem 0 0.4rem 0 !important; }
[data-testid="stMetricValue"], [data-testid="stDataFrame"] { font-variant-numeric: tabular-nums; }
[data-testid="stMetric"] > div:first-child { padding: 0.5rem 0.6rem !important; }
[data-testid="stMetricValue"] { font-size: 1.2rem; font-weight: 500; }
[data-testid="stMetricValue"] * { white-space: normal !important; overflow: visible !important; }
[data-testid="stMetricLabel"] * { white-space: normal !important; overflow: visible; }
[data-testid="stMetricDelta"] { font-size: 0.72rem; padding: 0.1rem 0.35rem; }
@media (max-width: 640px) { [data-testid="stMainBlockContainer"] { padding: 2.6rem 0.9rem 2rem 0.9rem; } }
[class*="st-key-tiles-"] { flex-wrap: wrap; gap: 0.6rem; }
[class*="st-key-tiles-"] > div { flex: 1 1 7.6rem !important; width: auto !important; min-width: 0; max-width: 13rem; }
@media (max-width: 640px) { [class*="st-key-tiles-"] > div { flex-basis: 9.2rem !important; } }
[data-testid="stColumn"] { min-width: min(100%, 16rem); }
.st-key-rank-columns [data-testid="stColumn"] { min-width: min(100%, 24rem); }
[data-testid="stButtonGroup"] div:has(> button) { flex-wrap: wrap; overflow: visible; max-width: 100%; }
[data-testid="stSidebarHeader"] { padding-bottom: 0; }
[data-testid="stSidebar"] [data-testid="stSelectbox"] [data-baseweb="select"] { font-size: 0.82rem; }
.st-key-chart-library, .st-key-menu-closing { display: none; }
.st-key-menu [data-testid="stCaptionContainer"] { margin-top: 0.5rem; }
/* By default, code in a caption is small and green, which is illegible in the dark theme. */
[data-testid="stCaptionContainer"] code { color: inherit; font-size: 0.9em; }
.st-key-menu [data-testid="stElementContainer"]:has([data-testid="stPageLink"]) { margin: 0; height: 1.5rem; }
.st-key-menu [data-testid="stPageLink-NavLink"] { height: 1.4rem; }
[data-testid="stStatusWidget"] { visibility: hidden; }
</style>
"""


def style() -> None:
    """Add the style sheet: no dimming while a part refreshes, digits of equal width in metrics."""
    st.html(_STYLE)


def is_dark_theme() -> bool:
    """True if the browser's theme is dark."""
    return getattr(st.context.theme, "type", None) == "dark"


def chart(
    draw: Callable[..., go.Figure],
    *shown: Any,
    key: str,
    what: str,
    selected: tuple[Hashable, ...] = (),
    clickable: bool = False,
    **options: Any,
) -> dict[str, Any] | None:
    """Draw the figure `draw(*shown, **options)`, which is rebuilt only if one of `shown` has changed.

    While `key` and `selected` (the user's choice, such as steps or ranks) stay the same, each refresh keeps the zoom
    and hidden lines; the zoom is stored in the address. `what`: text for screen readers. If `clickable`, returns the
    mark that was just clicked.
    """
    name = (st.session_state.get("run_id"), key)
    figure = cached_figure(name, draw, shown, options, dark=is_dark_theme(), selected=selected)
    return show_in_place(
        figure, key=key, config=_CHART, what=what, clickable=clickable, zoomed=zoom.in_address(key, selected),
        on_zoom=lambda ranges: zoom.into_address(key, selected, ranges),
    )  # fmt: skip


def tiles(shown: Sequence[tuple[str, str, str | None, str | None]], *, key: str) -> None:
    """Draw numbers in boxes of equal size that wrap: (name, value, text below, help)."""
    with st.container(horizontal=True, gap="small", key=f"tiles-{key}"):
        for name, value, beneath, more in shown:
            st.metric(
                name, value, beneath, delta_color="off", delta_arrow="off", border=True, height="stretch", help=more
            )


def markdown_text(text: object, limit: int = MAX_TEXT) -> str:
    """Escape text of a run for `st.markdown` and labels, and limit its length; names in backticks are code."""
    shown = " ".join(visible(str(text)[: 4 * limit]).split())
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    shown = escaped(shown).replace(":", "\\:")
    return with_code(shown)


def with_runbook_links(markdown: str) -> str:
    """Link each command that explains a finding to the Runbook page, in text from `markdown_text`."""
    return _EXPLAIN.sub(r"[\g<0>](runbook?section=\1)", markdown)


def empty_state(sentence: str, hint: str = "") -> None:
    """Draw a message in place of an empty chart: what is missing, and how to get it. Must not contain text of a run."""
    with st.container(border=True):
        st.markdown(f":gray[{sentence}]")
        if hint:
            st.caption(hint)


def table(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    *,
    key: str,
    height: int | None = None,
    column_config: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Draw a sortable table; text is shown literally, with control characters made visible. A table that is wider than
    the screen scrolls, except its first column, which names the rows.
    """
    columns = rows if isinstance(rows, Mapping) else pd.DataFrame(rows, dtype=object).to_dict("list")
    frame = pd.DataFrame({name: _shown_values(values) for name, values in columns.items()})
    if height is None and len(frame) > MAX_ROWS_SHOWN:
        height = 36 + 33 * MAX_ROWS_SHOWN
    columns_shown = {name: st.column_config.Column(pinned=True) for name in frame.columns[:1]} | dict(
        column_config or {}
    )
    return st.dataframe(
        frame,
        hide_index=True,
        key=key,
        height=height or "content",
        placeholder="–",
        column_config=columns_shown,
        **more,
    )


def _shown_values(values: Any) -> Any:
    """Values of a column. Text is escaped before it reaches pandas, because pandas' strings cannot hold lone
    surrogates."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufM":
        return values
    return [visible(value[:2_000]) if isinstance(value, str) else value for value in values]


def unique_names(names: Sequence[str]) -> list[str]:
    """Make column names unique: names that are equal, or equal when shortened, get a number."""
    found: list[str] = []
    for name in names:
        shown = visible(name)[:MAX_NAME]
        numbered = (f"{shown} ({number})" for number in itertools.count(2))
        found.append(next(one for one in itertools.chain((shown,), numbered) if one not in found))
    return found


def location(finding: Finding) -> str:
    """Short text with the steps, ranks and attempt of a finding."""
    first, last = finding.first_step, finding.last_step
    steps = "" if first is None else f"step {first}" if last in (None, first) else f"steps {first} to {last}"
    who = ranks_text(finding.ranks) if finding.ranks else ""
    attempt = f"attempt {finding.attempt}" if finding.attempt else ""
    return " · ".join(part for part in (steps, who, attempt) if part)
