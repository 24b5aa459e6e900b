"""Page on collectives: bandwidth by operation, size and group, exposed communication, waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from analyzers.account.device.exposure import exposed_calls, measure
from analyzers.account.goodput import CONTRADICTED, UNSPLIT
from analyzers.communication import bandwidth
from analyzers.figures.time import collectives as figures
from analyzers.figures.time import exposed
from analyzers.source import Source, floats, lacking
from analyzers.wording import group_text, rate_unit
from dashboard.data.sql import call_queries, queries
from dashboard.drawing import units
from dashboard.drawing.elements import chart, empty_state, table, tiles
from dashboard.frame import View, framed

__all__ = ["collectives"]

_COLUMNS = {
    "bytes": st.column_config.NumberColumn("bytes", format="localized"),  # with thousands separators
    "group": st.column_config.TextColumn("group", width=130),  # the default fits only the first names, which are short
}


def load_calls(source: Source) -> Any:
    """Calls by operation, group and size."""
    return bandwidth.call_columns(source)


def load_exposure(source: Source) -> dict[str, Any]:
    """Load means over the ranks for each step of the newest attempt; empty if waits were not recorded."""
    attempt = queries.newest_attempt(source)
    if attempt is None or lacking(source, collectives=("wait_ns", "issue_ns", "end_ns"), steps=("duration_ns",)):
        return {}
    steps, parts = measure(source, attempt).by_step()
    return {"step": steps, "parts": parts} if len(steps) else {}


def load_exposed_calls(source: Source) -> Any:
    """Load exposed calls by operation, group and size; empty if waits were not recorded."""
    attempt = queries.newest_attempt(source)
    if attempt is None or lacking(source, collectives=("wait_ns", "issue_ns", "end_ns"), steps=("duration_ns",)):
        return queries.none("op")
    return exposed_calls(source, attempt)


def load_aggregates(source: Source) -> dict[str, Any]:
    """{heading: rows}: sums over older steps, from which single calls were removed, and records of the NCCL plugin."""
    return {
        "Older steps, summed": call_queries.older_totals(source), "As NCCL ran them": call_queries.nccl_kernels(source),
        "Channels of NCCL": call_queries.nccl_channels(source), "Network links": call_queries.nccl_transfers(source),
    }  # fmt: skip


@framed("Collectives")
def collectives(view: View) -> None:
    """Draw the exposed share, waiting, bandwidth, and the table of all calls."""
    calls = view.ask(load_calls)
    if calls is None:
        return
    if not len(calls["op"]):
        empty_state(
            "No collective was recorded in this run.",
            "They are recorded with `probes.collectives = true`.",
        )
        return
    with st.container(key="collectives-numbers"):
        _exposed(view)
    with st.container(key="collectives-shares"):
        exposure = view.ask(load_exposure)
        if exposure:
            _shares(exposure)
            by_call = view.ask(load_exposed_calls)
            if by_call is not None and len(by_call["op"]):
                _by_call(by_call)
    st.subheader("Waiting", anchor=False)
    has_waits = bool(np.isfinite(floats(calls["wait_s"])).any())
    if has_waits:
        chart(figures.waits, calls, key="collectives-waits", what="Seconds waited by operation and group")
    else:
        empty_state("Waits in calls were not measured.", "On GPUs the time of a call on the device includes its waits.")
    st.subheader("Bandwidth", anchor=False)
    bus_gb_per_s = floats(calls["bus_gb_per_s"])
    if (bus_gb_per_s > 0).any():
        chart(figures.draw, calls, key="collectives-bandwidth", what="Bus bandwidth by size of the call")
        st.caption(
            "Finished calls only. Transfer time is measured on the last member to arrive, which does not wait."
            + (" A larger dot means more waiting." if has_waits else "")
        )
    else:
        empty_state("No bandwidth was measured.", "It needs finished collectives of at least two ranks.")
    unit, scale = rate_unit(float(np.max(bus_gb_per_s, initial=0.0, where=np.isfinite(bus_gb_per_s))))
    aggregates = view.ask(load_aggregates)
    if aggregates:
        _aggregates(aggregates)
    with st.expander("All calls as a table", expanded=True):
        table(
            {
                "operation": calls["op"], "group": _groups(calls), "bytes": calls["bytes"],
                f"bus {unit}": _significant(scale * bus_gb_per_s),
                "waited (s)": _significant(floats(calls["wait_s"])),
                "members": calls["n"],
                "transfer (ms)": _significant(floats(calls["transfer_ms"])), "calls": calls["num_calls"],
            }, key="collectives-table", column_config=_COLUMNS,
        )  # fmt: skip


def _aggregates(found: dict[str, Any]) -> None:
    """Draw the sums of older steps and the records of the NCCL plugin, if there are any."""
    for title, rows in found.items():
        if rows:
            st.subheader(title, anchor=False)
            table(rows, key=f"collectives-{title.lower().replace(' ', '-')}")


def _significant(values: Any) -> Any:
    """Rounded to four significant digits."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 10.0 ** (np.floor(np.log10(np.abs(values))) - 3)
        return np.where(np.isfinite(scale) & (scale > 0), np.round(values / scale) * scale, values).round(6)


def _groups(calls: Any) -> list[str]:
    return [group_text(str(name)) for name in calls["process_group"]]


def _shares(exposure: dict[str, Any]) -> None:
    st.subheader("Exposed and hidden", anchor=False)
    chart(
        exposed.draw, exposure["step"], *exposure["parts"], key="collectives-exposed",
        what="Exposed and hidden communication per step, milliseconds",
    )  # fmt: skip


def _by_call(found: queries.Columns) -> None:
    exposed_ms, transfer_ms = floats(found["exposed_ms"]), floats(found["transfer_ms"])
    table(
        {
            "operation": found["op"], "group": _groups(found), "bytes": found["bytes"],
            "exposed (ms a step)": _significant(exposed_ms),
            "transfer (ms)": _significant(transfer_ms),
            "waiting for stragglers (ms)": _significant(np.maximum(0.0, exposed_ms - transfer_ms)),
            "in flight (ms a step)": _significant(floats(found["busy_ms"])),
            "exposed (% of in flight)": np.round(100 * floats(found["exposed_ratio"]), 1),
            "calls a step": np.round(floats(found["num_calls"]), 2),
        }, key="collectives-exposed-calls", column_config=_COLUMNS,
    )  # fmt: skip
    num = int(found["num_classes"][0])
    more = f" Shown: the {len(exposed_ms):,} most exposed of {num:,}." if num > len(exposed_ms) else ""
    st.caption(f"Means over all ranks and steps of the newest attempt.{more}")


def _exposed(view: View) -> None:
    """Draw the shares of wall time lost to communication."""
    diagnosis = view.diagnosis()
    account = diagnosis.goodput if diagnosis is not None else None
    if account is None or not account.wall_s:
        return
    share = {name: seconds / account.wall_s for name, seconds in account.known_seconds.items()}
    if account.contradicted:
        st.warning(CONTRADICTED.format(why=account.contradicted))
    tiles(
        [
            (
                "Exposed" if account.is_split else UNSPLIT["communication"].capitalize(),
                "not judged" if account.contradicted else units.percent(share.get("communication")),
                "" if account.contradicted else "of the wall time",
                "Share of wall time in which ranks were blocked in transfers"
                + ("." if account.is_split else ", or waited for others: the two could not be told apart.")
                + " Communication hidden behind computation does not count.",
            ),
            (
                "Waiting for stragglers", units.percent(share.get("straggler")), "of the wall time",
                "Share of wall time in which ranks waited in a collective for its last member.",
            ),
            ("Training", units.percent(share.get("training")), "of the wall time", None),
        ], key="collectives",
    )  # fmt: skip
