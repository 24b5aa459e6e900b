"""Analyses of numerics: loss, gradients, loss scale and expert load."""

from __future__ import annotations

from analyzers.analysis import Analysis
from analyzers.numerics.expert_load import expert_load
from analyzers.numerics.gradient_flow import gradient_flow
from analyzers.numerics.gradient_noise import gradient_noise
from analyzers.numerics.logged_values import contradicted_values
from analyzers.numerics.loss.divergence import divergence
from analyzers.numerics.loss.loss_spike import loss_spikes
from analyzers.numerics.loss.validation import overfitting
from analyzers.numerics.loss_scale import loss_scale_collapse
from analyzers.numerics.nonfinite import non_finite_values

__all__ = ["ANALYSES"]

ANALYSES = (
    Analysis(kinds=("non_finite",), run=non_finite_values, live="each_tick"),
    Analysis(kinds=("loss_spike",), run=loss_spikes, records="histories", live="each_tick"),
    Analysis(kinds=("divergence",), run=divergence, records="histories", live="each_tick"),
    Analysis(kinds=("overfitting",), run=overfitting, live="each_tick"),
    Analysis(kinds=("loss_scale_collapse",), run=loss_scale_collapse, live="each_tick"),
    Analysis(kinds=("logged_value",), run=contradicted_values, records="sampled"),
    Analysis(kinds=("vanishing_gradients", "exploding_gradients"), run=gradient_flow),
    Analysis(kinds=("gradient_noise",), run=gradient_noise, records="compared"),
    Analysis(kinds=("expert_imbalance",), run=expert_load),
)
