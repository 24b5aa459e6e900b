"""Page on numerics: loss, gradients by parameter, NaN and Inf, learning rate, loss scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from analyzers.figures import course, gradients, loss, numbers
from analyzers.run.records.evaluations import evaluations
from analyzers.run.records.event_log import EventLog
from analyzers.settings.figures import compression_error
from analyzers.source import Source, floats
from dashboard.data.sql import queries
from dashboard.data.sql.gradient_queries import Gradients, gradient_table
from dashboard.drawing.elements import chart, empty_state
from dashboard.frame import View, framed
from probes.tape import event_kinds

__all__ = ["numerics"]


def load_numerics(source: Source) -> dict[str, Any]:
    """Load curves, gradients and changes of the loss scale."""
    scale = [
        (event.step, event.number("scale"))
        for event in EventLog.load(source, (event_kinds.LOSS_SCALE,)).of(event_kinds.LOSS_SCALE)
        if event.step is not None and event.number("scale") is not None
    ]
    return {
        "curve": course.loss_curve(source), "marks": course.marks(source), "rate": queries.rate(source),
        "evaluated": evaluations(source),
        "gradients": gradient_table(source), "scale": scale, "compression": compression_error(source),
        "experts": queries.expert_load(source), "logged": queries.logged_scalars(source),
    }  # fmt: skip


@framed("Numerics")
def numerics(view: View) -> None:
    """Draw the loss, the gradients, then rates and scales."""
    data = view.ask(load_numerics)
    if data is None:
        return
    diagnosis = view.diagnosis()
    if len(data["curve"]["loss"]):
        chart(
            loss.draw, data["curve"], data["marks"], diagnosis.fired if diagnosis else (), height=460,
            evaluated=data["evaluated"], key="numerics-loss",
            what="Training and validation loss, and gradient norm over the steps",
        )  # fmt: skip
    else:
        empty_state("No loss was recorded.")
    found, table = data["gradients"], data["gradients"].columns
    st.subheader("Gradient norm by parameter", anchor=False)
    if len(table["parameter"]):
        chart(gradients.norms, table, key="numerics-norms", what="Gradient norm of each parameter over the steps")
        st.caption(_what_is_shown(found))
        st.subheader("NaN and Inf", anchor=False)
        if (floats(table["nonfinite"]) > 0).any():
            chart(gradients.nonfinite, table, key="numerics-nonfinite", what="Parameters with NaN or Inf by step")
            st.caption("Sum over all ranks. A GPU reports only whether there were any, which counts as one.")
        else:
            empty_state("No measured gradient had NaN or Inf.")
    else:
        empty_state(
            "No gradient was measured by parameter.",
            "They are measured at an interval: `probes.gradient_interval`.",
        )
    left, right = st.columns(2, gap="medium")
    with left:
        st.subheader("Learning rate", anchor=False)
        if len(data["rate"]["step"]):
            chart(numbers.rate, data["rate"], key="numerics-rate", what="Learning rate over the steps")
        else:
            empty_state("No learning rate was recorded.")
    with right:
        st.subheader("Loss scale", anchor=False)
        if data["scale"]:
            chart(numbers.scale, data["scale"], key="numerics-scale", what="Loss scale after each overflow")
        else:
            empty_state(
                "No change of the loss scale was recorded.", "It changes in fp16 only, when gradients overflow."
            )
    if len(data["logged"]["step"]):
        st.subheader("Logged by the script", anchor=False)
        chart(numbers.logged, data["logged"], key="numerics-logged", what="Numbers that the script logged")
        st.caption("Means over the ranks of `rankscope.log(name=...)`. Table `scalars` has each rank.")
    if len(data["compression"]["step"]):
        st.subheader("Error of compressed gradients", anchor=False)
        chart(
            numbers.compression,
            data["compression"],
            key="numerics-compression",
            what="Relative error of compressed gradients",
        )
        st.caption(
            "Relative to the gradient without compression, in each measured step (`probes.compression_interval`)."
        )
    if len(data["experts"]["step"]):
        st.subheader("Load of experts", anchor=False)
        chart(
            numbers.experts, data["experts"], key="numerics-experts", what="Load of the most and the least used expert"
        )
        st.caption("Over all layers and ranks; 1 is an even share. Table `experts` has each expert.")


def _what_is_shown(found: Gradients) -> str:
    """Caption of the norms: their meaning, and the norms that are left out."""
    shown = found.columns
    num_steps, num_parameters = len(np.unique(shown["step"])), len(set(shown["parameter"].tolist()))
    text = "Largest norm over the ranks' shards. Measured every `probes.gradient_interval` steps."
    if num_steps < found.num_steps:
        text += (
            f" Shown: {num_steps} of {found.num_steps} measured steps: evenly spaced ones, and those with NaN or Inf."
        )
    if num_parameters < found.num_parameters:
        text += (
            f" Shown: {num_parameters:,} of {found.num_parameters:,} parameters: those with NaN or Inf, the largest "
            "and smallest norms, and evenly spaced ones."
        )
    return text
