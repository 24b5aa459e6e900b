"""First page of a run: state, speed, open findings, loss, goodput."""

from __future__ import annotations

import math
from typing import Any

import streamlit as st

from analyzers.diagnose import Diagnosis
from analyzers.figures import course, loss, speed
from analyzers.figures.time import goodput
from analyzers.finding import Finding
from analyzers.health.utilisation import flops_per_token, mfu, why_not_judged
from analyzers.plugin_calls.named import MAX_OF_A_KIND, first_of, folded
from analyzers.run.findings.open_findings import reported_findings
from analyzers.run.records.evaluations import evaluations
from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.source import Source
from dashboard.data.current_findings import CurrentFindings, current_findings
from dashboard.data.sql import queries
from dashboard.drawing import units
from dashboard.drawing.elements import chart, empty_state, tiles
from dashboard.frame import View, framed
from dashboard.views.findings import card, verdict_without_findings
from dashboard.views.goodput import GOODPUT
from probes.settings.described import TrainFacts
from probes.settings.section import read
from probes.tape.redaction.printable import escaped, visible

__all__ = ["overview"]

MAX_CARDS = 4
_IN_REPORT = {"step_ms": "step_ms_median", "tokens_per_s": "tokens_per_s"}
"""{value over the newest steps: the report's fact for the same value over all steps}."""


def load_lines(source: Source) -> dict[str, Any]:
    """Curves over all steps."""
    curve, marks = course.loss_curve(source), course.marks(source)
    return {"curve": curve, "marks": marks, "evaluated": evaluations(source), "speed": queries.speed(source)}


@framed("Overview")
def overview(view: View) -> None:
    """Draw the newest values, open findings, loss, speed, goodput."""
    pulse, reports = view.ask(queries.pulse, often=True), view.ask(reported_findings, often=True)
    if pulse is None or reports is None:
        return
    diagnosis = view.diagnosis()
    known = current_findings(diagnosis, reports, newest_attempt=view.state.attempt, has_ended=not view.state.is_live)
    _pulse(view, pulse, diagnosis)
    account = diagnosis.goodput if diagnosis is not None else None
    with st.container(key="overview-account"):
        st.subheader("Where the time went", anchor=False)
        # This container always has content, so that the elements below keep their place and zoom.
        if account is None or account.wall_s <= 0:
            st.caption("Computing the account…" if diagnosis is None else "No step was recorded.")
        else:
            chart(goodput.strip, account, key="overview-goodput", what="Shares of the wall time by category")
    with st.container(key="overview-findings"):  # separate container: elements below keep their identity
        _findings(view, known, diagnosis)
    with st.container(key="overview-lines"):
        lines = view.ask(load_lines)
        if lines is not None:
            _lines(lines, known.findings)


def _lines(lines: dict[str, Any], found: list[Finding]) -> None:
    left, right = st.columns([3, 2], gap="medium")
    with left:
        st.subheader("Loss", anchor=False)
        if len(lines["curve"]["loss"]):
            chart(
                loss.draw, lines["curve"], lines["marks"], found, key="overview-loss",
                evaluated=lines["evaluated"],
                what="Training and validation loss, gradient norm, findings, rollbacks and checkpoints over the steps",
            )  # fmt: skip
        else:
            empty_state("No loss was recorded.")
    with right:
        st.subheader("Step time", anchor=False)
        if len(lines["speed"]["step"]):
            chart(
                speed.draw, lines["speed"], key="overview-speed", what="Step time and tokens per second over the steps"
            )
        else:
            empty_state("No step has ended.")


def _pulse(view: View, pulse: dict[str, float | None], diagnosis: Diagnosis | None) -> None:
    goodput_ratio = diagnosis.goodput.goodput_ratio if diagnosis is not None and diagnosis.goodput else None
    planned = _planned_steps(view.manifest)
    step = max((number for number in (view.state.step, pulse["step"]) if number is not None), default=None)
    done = f"of {planned}" if planned and (step or 0) <= planned else None
    fullest = pulse["memory_rank"]
    numbers = [
        ("Step", units.amount(step) if step is None else f"{step:.0f}", done, None),
        ("Loss", _loss_text(pulse["loss"]), None, "Of the newest step."),
        _speed("Tokens/s", pulse, diagnosis, is_live=view.state.is_live),
        _speed("Step time", pulse, diagnosis, is_live=view.state.is_live),
        _work_rate(view.manifest, pulse, diagnosis, is_live=view.state.is_live),
        ("Goodput", units.percent(goodput_ratio), None, GOODPUT),
        (
            "Memory", units.data_size(pulse["memory_bytes"]),
            None if fullest is None else f"rank {fullest:.0f}", "Of the rank with the most memory.",
        ),
    ]  # fmt: skip
    tiles(numbers, key="pulse")
    if planned and step is not None and view.state.is_live:
        st.progress(min(1.0, step / planned))


def _shown(
    pulse: dict[str, float | None], diagnosis: Diagnosis | None, name: str, *, is_live: bool
) -> tuple[float | None, float | None]:
    """A value over the newest steps and over all steps. For an ended run, only the value over all steps is shown, as in
    the report.
    """
    of_all: Any = None if diagnosis is None else diagnosis.run.get(_IN_REPORT[name])
    return (pulse[name], of_all) if is_live or of_all is None else (of_all, None)


def _speed(
    label: str, pulse: dict[str, float | None], diagnosis: Diagnosis | None, *, is_live: bool
) -> tuple[str, str, str | None, str]:
    """Tile of the step time, or of tokens per second."""
    name = "step_ms" if label == "Step time" else "tokens_per_s"
    value, of_all = _shown(pulse, diagnosis, name, is_live=is_live)
    beneath = f"{_speed_text(name, of_all)} of all steps" if of_all is not None else None
    what = "Median over ranks and" if name == "step_ms" else "Of all ranks, by wall time, over"
    if is_live or value is None or value == pulse[name]:
        return label, _speed_text(name, value), beneath, f"{what} the newest {NEWEST_STEPS} steps."
    return label, _speed_text(name, value), None, f"{what} all steps."


def _speed_text(name: str, value: float | None) -> str:
    if name == "step_ms":
        return units.duration(value / 1e3 if value is not None else None)
    return units.amount(value)


def _loss_text(loss: float | None) -> str:
    if loss is None:
        return "–"
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def _work_rate(
    manifest: dict[str, Any], pulse: dict[str, float | None], diagnosis: Diagnosis | None, *, is_live: bool
) -> tuple[str, str, str | None, str]:
    """MFU of the ranks with records, with the model's FLOP/s of these ranks below it."""
    meant = "Model FLOPs utilisation: share of the devices' peak that the model uses."
    per_token, tokens_per_s = flops_per_token(manifest), _shown(pulse, diagnosis, "tokens_per_s", is_live=is_live)[0]
    missing = escaped(visible(why_not_judged(manifest) or "")[:200])
    if per_token is None:
        return "MFU", "unknown", None, f"{meant} Unknown: {missing}."
    if tokens_per_s is None:
        return "MFU", "–", None, meant
    beneath = f"{units.amount(per_token * tokens_per_s)}FLOP/s"
    if diagnosis is not None and not is_live:
        ratio: Any = diagnosis.run.get("mfu_ratio")
    else:
        ratio = mfu(manifest, tokens_per_s=tokens_per_s, num_devices=int(pulse["num_ranks"] or 0))
    if ratio is None:
        return "MFU", "unknown", beneath, f"{meant} {missing[:1].upper()}{missing[1:]}."
    return "MFU", units.percent(ratio), beneath, meant


def _planned_steps(manifest: dict[str, Any]) -> int | None:
    steps = read(TrainFacts, manifest).steps
    return int(steps) if steps is not None and steps > 0 else None


def _findings(view: View, known: CurrentFindings, diagnosis: Diagnosis | None) -> None:
    if not known.findings:
        if diagnosis is None:
            st.caption("The analyzers are reading the run…")
        else:
            st.markdown(verdict_without_findings(view, diagnosis))
        return
    shown = first_of(folded(known.findings, MAX_OF_A_KIND), MAX_CARDS)
    for number, finding in enumerate(shown, 1):
        card(view, finding, number, closed=known.closed.get(finding.id, ""), has_link=True, is_numbered=True)
    shown_ids = {finding.id for finding in shown}
    others = [finding for finding in known.findings if finding.id not in shown_ids]
    if others:
        num_open = sum(finding.id not in known.closed for finding in others)
        st.caption(f"{len(others)} more on the page Findings{f', {num_open} of them open' if num_open else ''}.")
