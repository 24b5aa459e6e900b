"""Page on checkpoints and recovery: failures, rollbacks, and which checkpoints are good."""

from __future__ import annotations

import math
import time
from typing import Any

import streamlit as st

from analyzers.figures.time import recovery
from analyzers.kinds import KINDS
from analyzers.report.terminal.diagnosis_text import saves_line
from analyzers.run.records.event_log import EventLog
from analyzers.run.timeline import measure
from analyzers.source import Source
from dashboard.data.sql import queries
from dashboard.drawing import units
from dashboard.drawing.elements import chart, empty_state, markdown_text, table
from dashboard.frame import View, framed
from probes.tape import event_kinds

__all__ = ["checkpoints"]


def load_timeline(source: Source, now_s: int | None) -> dict[str, Any]:
    """Phases, events, checkpoints, skipped batches."""
    log = EventLog.load(
        source, (event_kinds.BATCH_SKIPPED, event_kinds.ROLLBACK, event_kinds.RANK_EXIT, event_kinds.EVALUATION)
    )
    return {
        "timeline": measure(source, None if now_s is None else now_s * 1_000_000_000),
        "checkpoints": queries.checkpoints(source),
        "skipped": [
            {"attempt": e.attempt, "step": e.step, "batch": e.integer("batch_index"), "reason": e.text("reason")}
            for e in log.of(event_kinds.BATCH_SKIPPED)
        ],
        "rollbacks": [
            {
                "attempt": e.attempt, "from step": e.integer("from_step"), "to step": e.integer("to_step"),
                "from": e.text("tier"), "duration (s)": e.number("duration_s"),
                "verdict": _title(e.text("verdict")),
                "reason": e.text("reason"),
                "skipped batches": ", ".join(map(str, e.integers("skipped_batches")[:20])),
                "trained again": ", ".join(map(str, e.integers("replayed_batches")[:20])),
            }
            for e in log.of(event_kinds.ROLLBACK)
        ],
    }  # fmt: skip


def _title(kind: str) -> str:
    known = KINDS.get(kind)
    return known.title.lower() if known is not None else kind


@framed("Recovery")
def checkpoints(view: View) -> None:
    """Draw the timeline of the run, then its rollbacks and checkpoints."""
    # The time is rounded to four seconds, so that polls within them share a cache entry.
    data = view.ask(load_timeline, int(time.time()) // 4 * 4 if view.state.is_live else None)
    if data is None:
        return
    if data["timeline"] is None:
        empty_state("No step was recorded.")
        return
    phases = data["timeline"]
    chart(recovery.draw, phases.phases, phases.moments, key="life", what="Phases of the run, by attempt")
    _interval(view)
    st.subheader("Rollbacks", anchor=False)
    if data["rollbacks"]:
        table(data["rollbacks"], key="rollbacks")
    else:
        empty_state("There was no rollback.")
    if data["skipped"]:
        st.subheader("Skipped batches", anchor=False)
        table(data["skipped"], key="skipped")
    st.subheader("Checkpoints", anchor=False)
    saved = data["checkpoints"]
    if not len(saved["step"]):
        empty_state("No checkpoint was saved.")
        return
    tiers = sorted({str(tier) for tier in saved["tier"]})
    tier = tiers[0]
    if len(tiers) > 1:
        tier = st.segmented_control("Tier", tiers, default=tier, key="tier", required=True) or tier
    rows = [i for i in range(len(saved["step"])) if saved["tier"][i] == tier]
    table(
        {
            "step": [saved["step"][i] for i in rows],
            "state": [str(saved["states"][i]).rpartition(", ")[2] for i in rows], "tier": [tier] * len(rows),
            "size": [units.data_size(_number(saved["bytes"][i])) for i in rows],
            "duration (ms)": [_number(saved["duration_ms"][i]) for i in rows],
            "stall (ms)": [_number(saved["stall_ms"][i]) for i in rows],
            "reason": [saved["reason"][i] for i in rows], "attempt": [saved["attempt"][i] for i in rows],
            "earlier states": [str(saved["states"][i]).rpartition(", ")[0] for i in rows],
        }, key="checkpoints-table",
    )  # fmt: skip
    num = int(saved["num"][rows[0]])
    if num > len(rows):
        st.caption(f"The newest {len(rows):,} of {num:,}.")
    st.caption("Good: complete, verified by its hashes, and followed by enough healthy steps.")


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else round(number, 3)


def _interval(view: View) -> None:
    """Draw the checkpoint interval suggested by `analyze`."""
    diagnosis = view.diagnosis()
    interval = diagnosis.run.get("checkpoint_interval") if diagnosis is not None else None
    if diagnosis is None or not isinstance(interval, dict):
        return
    if line := saves_line(interval, diagnosis.run.get("steps")):
        st.caption(markdown_text(line))
