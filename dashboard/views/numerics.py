"""Whether it learns, and whether its numbers are sound: loss, gradients by layer, what was not finite, rate, scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from analyzers.figures import gradients, loss, numbers
from analyzers.figures import queries as shared
from analyzers.run.event_log import EventLog
from analyzers.source import Source, floats
from dashboard.data import queries
from dashboard.data.gradient_queries import Gradients, gradient_table
from dashboard.drawing.elements import chart, nothing
from dashboard.frame import View, framed
from probes.tape import event_kinds

__all__ = ["numerics"]


def load_numerics(source: Source) -> dict[str, Any]:
    """Curves, gradients and the scale's changes."""
    scale = [
        (event.step, event.number("scale"))
        for event in EventLog.load(source, (event_kinds.LOSS_SCALE,)).of(event_kinds.LOSS_SCALE)
        if event.step is not None and event.number("scale") is not None
    ]
    return {
        "curve": shared.loss_curve(source), "marks": shared.marks(source), "rate": queries.rate(source),
        "gradients": gradient_table(source), "scale": scale, "compression": queries.compression_error(source),
        "experts": queries.expert_load(source),
    }  # fmt: skip


@framed("Numerics")
def numerics(view: View) -> None:
    """From the whole to the layers."""
    data = view.ask(load_numerics)
    if data is None:
        return
    diagnosis = view.diagnosis()
    if len(data["curve"]["loss"]):
        chart(
            loss.draw, data["curve"], data["marks"], diagnosis.fired if diagnosis else (), height=460,
            key="numerics-loss", what="Loss and gradient norm over the steps",
        )  # fmt: skip
    else:
        nothing("No loss was recorded yet.")
    found, table = data["gradients"], data["gradients"].columns
    st.subheader("Gradient norm by parameter", anchor=False)
    if len(table["parameter"]):
        chart(gradients.norms, table, key="numerics-norms", what="Gradient norm of each parameter over the steps")
        st.caption(_what_is_shown(found))
    else:
        nothing(
            "No gradient was measured parameter by parameter yet.",
            "They are at an interval: `probes.gradient_interval`.",
        )
    st.subheader("Not finite", anchor=False)
    if (floats(table["nonfinite"]) > 0).any():
        chart(gradients.nonfinite, table, key="numerics-nonfinite", what="Parameters with NaN or Inf by step")
        st.caption("Of all ranks together. Of a GPU's late reading the number is not known: it counts as one.")
    else:
        nothing("No gradient that was looked at held a NaN or an Inf.")
    left, right = st.columns(2, gap="medium")
    with left:
        st.subheader("Learning rate", anchor=False)
        if len(data["rate"]["step"]):
            chart(numbers.rate, data["rate"], key="numerics-rate", what="Learning rate over the steps")
        else:
            nothing("No learning rate was recorded.")
    with right:
        st.subheader("Loss scale", anchor=False)
        if data["scale"]:
            chart(numbers.scale, data["scale"], key="numerics-scale", what="Loss scale after each overflow")
        else:
            nothing("The loss scale never changed.", "It does in fp16 only, when gradients overflow.")
    if len(data["compression"]["step"]):
        st.subheader("Error of compressed gradients", anchor=False)
        chart(
            numbers.compression,
            data["compression"],
            key="numerics-compression",
            what="Relative error of compressed gradients",
        )
        st.caption("Against the gradient without compression, in each measured step (`probes.compression_interval`).")
    if len(data["experts"]["step"]):
        st.subheader("Load of experts", anchor=False)
        chart(
            numbers.experts, data["experts"], key="numerics-experts", what="Load of the most and the least used expert"
        )
        st.caption("Of all layers, over all ranks; 1 is an even share. Table `experts` has each of them.")


def _what_is_shown(found: Gradients) -> str:
    """How the norms are to be read, and what is left out."""
    shown = found.columns
    num_steps, num_parameters = len(np.unique(shown["step"])), len(set(shown["parameter"].tolist()))
    text = "The largest norm of the ranks, each of what it holds; between the steps nothing was measured"
    text += " (`probes.gradient_interval`)."
    if num_steps < found.num_steps:
        text += f" {num_steps:,} of {found.num_steps:,} measured steps are shown: evenly, and those with NaN or Inf."
    if num_parameters < found.num_parameters:
        text += (
            f" {num_parameters:,} of {found.num_parameters:,} parameters are shown: those with NaN or Inf, the largest "
            "and the smallest norms, the others evenly."
        )
    return text
