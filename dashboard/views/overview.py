"""The first page: is it well, how fast is it, what is wrong, how does it learn."""

from __future__ import annotations

from typing import Any

import streamlit as st

from analyzers.diagnose import Diagnosis
from analyzers.finding import Finding
from analyzers.report import queries as shared
from analyzers.report.figures import goodput, loss, speed
from analyzers.source import Source

from .. import queries, units
from ..frame import View, framed
from ..known_findings import known_findings
from ..show import chart, nothing, said
from .findings import card

__all__ = ["overview"]

MAX_CARDS = 4


def load_overview(source: Source) -> dict[str, Any]:
    """Everything but the diagnosis."""
    return {
        "pulse": queries.pulse(source),
        "curve": shared.loss_curve(source),
        "marks": shared.marks(source),
        "speed": queries.speed(source),
        "said": queries.findings_said(source),
    }


@framed("Overview")
def overview(view: View) -> None:
    """State, pulse, open findings, loss, speed, goodput."""
    data = view.ask(load_overview)
    if data is None:
        return
    diagnosis = view.diagnosis()
    found = known_findings(diagnosis, data["said"])
    _pulse(view, data["pulse"], diagnosis)
    _findings(view, found, diagnosis)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        st.subheader("Loss", anchor=False)
        if len(data["curve"]["loss"]):
            chart(
                loss.draw(data["curve"], data["marks"], found), key="overview-loss",
                what="Loss and gradient norm over the steps, with findings, rollbacks and checkpoints",
            )  # fmt: skip
        else:
            nothing("No loss was recorded yet.")
    with right:
        st.subheader("Step time", anchor=False)
        if len(data["speed"]["step"]):
            chart(
                speed.draw(data["speed"]), key="overview-speed", what="Step time and tokens per second over the steps"
            )
        else:
            nothing("No step has ended yet.")
    account = diagnosis.goodput if diagnosis is not None else None
    if account is not None and account.wall_s > 0:
        st.subheader("Where the time went", anchor=False)
        chart(goodput.strip(account), key="overview-goodput", what="Shares of the wall time by category")


def _pulse(view: View, pulse: dict[str, float | None], diagnosis: Diagnosis | None) -> None:
    goodput_ratio = diagnosis.goodput.goodput_ratio if diagnosis is not None and diagnosis.goodput else None
    step, planned = view.state.step, _planned_steps(view.manifest)
    done = f"of {planned:,}" if planned else None
    tiles = [
        ("Step", units.amount(step) if step is None else f"{step:,}", done),
        ("Loss", "–" if pulse["loss"] is None else f"{pulse['loss']:.4f}", None),
        ("Tokens/s", units.amount(pulse["tokens_per_s"]), None),
        ("Step time", units.duration(pulse["step_ms"] / 1e3 if pulse["step_ms"] is not None else None), None),
        _work_rate(view.manifest, pulse["tokens_per_s"]),
        ("Goodput", units.percent(goodput_ratio), None),
        ("Memory", units.data_size(pulse["memory_bytes"], digits=0), "largest rank" if pulse["memory_bytes"] else None),
    ]
    with st.container(horizontal=True, gap="small", key="pulse"):
        for name, value, beneath in tiles:
            st.metric(
                name, value, beneath, delta_color="off", delta_arrow="off", border=True, height="stretch", width=138
            )
    if planned and step is not None and view.state.is_live:
        st.progress(min(1.0, step / planned))


def _work_rate(manifest: dict[str, Any], tokens_per_s: float | None) -> tuple[str, str, str | None]:
    """MFU where the device's peak is known, else the model's floating-point operations a second."""
    per_token, peak = manifest.get("flops_per_token"), manifest.get("peak_flops")
    parameters = manifest.get("num_parameters")
    if not isinstance(per_token, (int, float)):
        per_token = 6 * parameters if isinstance(parameters, (int, float)) else None
    if per_token is None or tokens_per_s is None:
        return "Model FLOP/s", "–", None
    rate = per_token * tokens_per_s
    world_size = manifest.get("world_size")
    if isinstance(peak, (int, float)) and peak > 0 and isinstance(world_size, int) and world_size > 0:
        return "MFU", units.percent(rate / (peak * world_size)), f"{units.amount(rate)}FLOP/s"
    return "Model FLOP/s", units.amount(rate), "all ranks"


def _planned_steps(manifest: dict[str, Any]) -> int | None:
    config = manifest.get("config")
    train = config.get("train") if isinstance(config, dict) else None
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0 else None


def _findings(view: View, found: list[Finding], diagnosis: Diagnosis | None) -> None:
    if not found:
        if diagnosis is None:
            st.caption("The analyzers are looking at the run…")
        else:
            st.markdown(f":green[:material/check_circle: {said(diagnosis.verdict)}]")
        return
    for number, finding in enumerate(found[:MAX_CARDS], 1):
        card(view.run_id, finding, number)
    if len(found) > MAX_CARDS:
        st.caption(f"and {len(found) - MAX_CARDS} more on the page Findings")
