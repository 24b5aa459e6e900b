"""Checkpoints and recovery: what broke the run, where it went on, which states can be trusted."""

from __future__ import annotations

import time
from typing import Any

import streamlit as st

from analyzers.figures import recovery
from analyzers.run.event_log import EventLog
from analyzers.run.timeline import measure
from analyzers.source import Source
from dashboard.data import queries
from dashboard.drawing import units
from dashboard.drawing.elements import chart, nothing, said, table
from dashboard.frame import View, framed
from probes.tape import event_kinds

__all__ = ["checkpoints"]


def load_life(source: Source, now_s: int | None) -> dict[str, Any]:
    """Phases, moments, checkpoints, skipped batches."""
    log = EventLog.load(
        source, (event_kinds.BATCH_SKIPPED, event_kinds.ROLLBACK, event_kinds.RANK_EXIT, event_kinds.EVALUATION)
    )
    return {
        "life": measure(source, None if now_s is None else now_s * 1_000_000_000),
        "checkpoints": queries.checkpoints(source),
        "skipped": [
            {"attempt": e.attempt, "step": e.step, "batch": e.integer("batch_index"), "reason": e.text("reason")}
            for e in log.of(event_kinds.BATCH_SKIPPED)
        ],
        "rollbacks": [
            {
                "attempt": e.attempt, "from step": e.integer("from_step"), "to step": e.integer("to_step"),
                "from": e.text("tier"), "took (s)": e.number("duration_s"), "verdict": e.text("verdict"),
                "reason": e.text("reason"), "skipped batches": ", ".join(map(str, e.integers("skipped_batches")[:20])),
            }
            for e in log.of(event_kinds.ROLLBACK)
        ],
    }  # fmt: skip


@framed("Checkpoints and recovery")
def checkpoints(view: View) -> None:
    """The life of the run, then what it is made of."""
    data = view.ask(load_life, int(time.time()) // 4 * 4 if view.state.is_live else None)
    if data is None:
        return
    if data["life"] is None:
        nothing("No step was recorded yet.")
        return
    life = data["life"]
    chart(recovery.draw, life.phases, life.moments, key="life", what="Phases of the run, by attempt")
    _interval(view)
    st.subheader("Rollbacks", anchor=False)
    if data["rollbacks"]:
        table(data["rollbacks"], key="rollbacks")
    else:
        nothing("The run never had to go back.")
    if data["skipped"]:
        st.subheader("Batches that were left out", anchor=False)
        table(data["skipped"], key="skipped")
    st.subheader("Checkpoints", anchor=False)
    saved = data["checkpoints"]
    if not len(saved["step"]):
        nothing("No checkpoint was saved yet.")
        return
    tiers = st.segmented_control("Where", ["disk", "memory"], default="disk", key="tier", required=True)
    rows = [i for i in range(len(saved["step"])) if saved["tier"][i] == (tiers or "disk")]
    table(
        {
            "step": [saved["step"][i] for i in rows], "attempt": [saved["attempt"][i] for i in rows],
            "states, in order": [saved["states"][i] for i in rows],
            "size": [units.data_size(_number(saved["bytes"][i])) for i in rows],
            "took (ms)": [_number(saved["duration_ms"][i]) for i in rows],
            "training stood still (ms)": [_number(saved["stall_ms"][i]) for i in rows],
            "reason": [saved["reason"][i] for i in rows],
        }, key="checkpoints-table",
    )  # fmt: skip
    num = int(saved["num"][rows[0]]) if rows else 0
    if num > len(rows):
        st.caption(f"The newest {len(rows):,} of {num:,}.")
    st.caption("Good: complete, verified by its hashes, and followed by enough healthy steps.")


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return round(number, 3) if number == number else None


def _interval(view: View) -> None:
    """How often to save, as `analyze` says it."""
    diagnosis = view.diagnosis()
    interval = diagnosis.run.get("checkpoint_interval") if diagnosis is not None else None
    if isinstance(interval, dict) and isinstance(interval.get("steps"), int):
        st.caption(
            said(
                f"A save costs {units.duration(interval.get('cost_s'))} of standstill here; with the failures seen or "
                f"assumed, every {interval['steps']:,} steps is the best interval (Daly)."
            )
        )
