"""Page on logs: what the processes of the run printed, and in which step."""

from __future__ import annotations

from datetime import UTC, datetime

import streamlit as st

from analyzers.source import Source
from analyzers.wording import counted
from dashboard.data.run_logs import LogLine, RunLogs, run_logs
from dashboard.data.sql.step_range import contains, numbers
from dashboard.drawing.elements import empty_state, markdown_text, table
from dashboard.frame import View, framed
from store.published.copy_time import is_copy

__all__ = ["MAX_PROBLEMS", "logs"]

MAX_ROWS = 2_000
MAX_PROBLEMS = 5


def load_logs(source: Source, path: str) -> RunLogs:
    """Lines of the run's folder."""
    return run_logs(source, path)


@framed("Logs")
def logs(view: View) -> None:
    """Draw the filter, and the newest lines that match it."""
    found: RunLogs | None = view.ask(load_logs, str(view.access.run.path))
    if found is None:
        return
    for problem in found.problems[:MAX_PROBLEMS]:
        st.caption(markdown_text(f"Not read: {problem}", 300))
    if not found.lines:
        _nothing(found, of_address=is_copy(view.access.run))
        return
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        rank_text = st.text_input("Rank", key="log-rank", placeholder="any: 3 or 0-7", width=150, bind="query-params")
        step_text = st.text_input("Step", key="log-step", placeholder="any: 60-70", width=150, bind="query-params")
        words = st.text_input("Text", key="log-text", placeholder="part of a line", width=240, bind="query-params")
        files = sorted({line.source for line in found.lines})
        source = st.selectbox(
            "File", files, index=None, key="log-file", placeholder="all files", width=260, bind="query-params",
            format_func=lambda name: markdown_text(name, 80),
        )  # fmt: skip
    ranks, steps = numbers(rank_text or ""), numbers(step_text or "")
    if ranks is None or steps is None:
        empty_state("Ranks and steps are numbers and ranges.", "For example `3`, `0-7` or `3, 12-15`.")
        return
    text = (words or "").lower()
    shown = [
        line
        for line in found.lines
        if contains(ranks, line.rank) and contains(steps, line.step)
        and (source is None or line.source == source) and text in line.text.lower()
    ]  # fmt: skip
    if not shown:
        empty_state("No line matches the filter.", _unaligned(found) if steps else "")
        return
    _draw(shown, found)


def _draw(shown: list[LogLine], found: RunLogs) -> None:
    newest = shown[-MAX_ROWS:]
    table(
        {
            "step": [line.step for line in newest],
            "rank": [line.rank for line in newest],
            "attempt": [line.attempt for line in newest],
            "line": [line.text for line in newest],
            "time (UTC)": [_time(line.wall_ns) for line in newest],
            "step known from": [line.step_from for line in newest],
            "file": [f"{line.source}:{line.line}" for line in newest],
        },
        key="logs-table", height=min(720, 38 + 35 * len(newest)),
        column_config={
            "line": st.column_config.TextColumn("line", width="large"),
            "step": st.column_config.NumberColumn("step", width=60),
            "rank": st.column_config.NumberColumn("rank", width=50),
            "attempt": st.column_config.NumberColumn("attempt", width=72),
        },
    )  # fmt: skip
    last = f"The last {MAX_ROWS:,} of " if len(shown) > MAX_ROWS else ""
    more = f"{last}{counted(len(shown), 'line')}. "
    cut = f"Of {found.num_cut} long files only the end was read; line numbers count from the start of that part. "
    st.caption(
        f"{more}{cut if found.num_cut else ''}`line`: the line names its step. `time`: the rank was in that step at "
        "the line's time (UTC unless the line names a zone). `above`: same as the line above. `last write`: the step "
        "in which the file was last written. " + _unaligned(found)
    )


def _unaligned(found: RunLogs) -> str:
    num = sum(line.step is None for line in found.lines)
    they_have = "it has" if num == 1 else "they have"
    return f"The step of {counted(num, 'line')} is not known: {they_have} neither a step nor a time." if num else ""


def _nothing(found: RunLogs, *, of_address: bool) -> None:
    if of_address:
        empty_state(
            "Logs are not published: they are in the run's folder on its nodes.",
            "These pages show what the nodes have published to an address. For logs, open the run's folder.",
        )
    elif found.num_files:
        empty_state(
            f"The ranks of this run printed nothing: {counted(found.num_files, 'log file')} without a line.",
            "This page shows what a training script prints; Rankscope's trainer writes to its tapes (see Events).",
        )
    else:
        empty_state(
            "The folder of this run has no logs.",
            "`rankscope train` keeps what its ranks print. With `rankscope run` or another launcher, the launcher "
            "has the output (torchrun: `--log-dir`): pass that folder and the run to `rankscope analyze`.",
        )


def _time(wall_ns: int | None) -> str:
    return "" if wall_ns is None else datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%m-%d %H:%M:%S.%f")[:-3]
