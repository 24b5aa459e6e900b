"""Page on pipelines: the schedule of a step by microbatch, and each rank's bubble with its causes."""

from __future__ import annotations

from typing import Any

import streamlit as st

from analyzers.account.device.measured_by import has_device_calls, is_stamped
from analyzers.account.wait_split import pipelines
from analyzers.figures.time import schedule as figures
from analyzers.figures.time.activity import schedule_of_step
from analyzers.pipeline.pipeline_bubble import FEW_STEPS, HOST_SPANS, NOT_MEASURED, Bubble, load_pipelines, summarise
from analyzers.source import Source, ints
from dashboard.data.sql import queries
from dashboard.drawing import units
from dashboard.drawing.elements import chart, empty_state, markdown_text, tiles
from dashboard.frame import View, framed
from probes.settings.described import ParallelFacts
from probes.settings.section import read

__all__ = ["pipeline"]


def load_members(source: Source) -> dict[int, dict[str, Any]]:
    """{attempt: {"members": ranks of each pipeline, "last": newest finished step}} for attempts that have both."""
    if not (source.has("ranks") and source.has("spans")):
        return {}
    last = queries.last_finished_steps(source)  # an unfinished step has only some of its spans
    found: dict[int, dict[str, Any]] = {}
    for attempt, members in pipelines(source):
        if attempt in last:
            found.setdefault(attempt, {"last": last[attempt], "members": []})["members"].append(tuple(members))
    return found


def load_schedule(source: Source, attempt: int, step: int, members: tuple[int, ...]) -> Any:
    """Spans of one step."""
    return schedule_of_step(source, attempt, step, members)


def load_bubble(source: Source, attempt: int, members: tuple[int, ...], schedule: str) -> dict[str, Any]:
    """Load the bubble of all pipelines (as in the report) and of one pipeline. Either may be None; `why` is the reason.

    Host spans of a GPU run do not measure the bubble, so for such a run both are None.
    """
    if has_device_calls(source, attempt) or is_stamped(source, attempt):
        return {"bubble": None, "chosen": None, "why": HOST_SPANS}
    found = load_pipelines(source, attempt)
    chosen = [pipeline for pipeline in found if tuple(pipeline.ranks) == members]
    return {"bubble": summarise(found, schedule), "chosen": summarise(chosen, schedule), "why": FEW_STEPS}


@framed("Pipeline")
def pipeline(view: View) -> None:
    """Draw one pipeline of an attempt, and one of its steps."""
    found = view.ask(load_members)
    if found is None:
        return
    if not found:
        empty_state("This run has no pipeline.", "Set `parallel.pp` to use one.")
        return
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        attempt = max(found)
        if len(found) > 1:
            attempt = st.selectbox(
                "Attempt", sorted(found, reverse=True), key="pipeline-attempt", width=120, bind="query-params"
            )
        last, choices = found[attempt]["last"], found[attempt]["members"]
        members = choices[0]
        if len(choices) > 1:
            members = st.selectbox(
                "Pipeline of ranks", choices, key=f"pipeline-{attempt}", width=260, bind="query-params",
                format_func=lambda ranks: ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else ""),
            )  # fmt: skip
        asked = st.number_input(
            "Step", min_value=0, value=None, step=1, key=f"pipeline-step-{attempt}", width=200,
            placeholder=f"newest ({last})", bind="query-params",
        )  # fmt: skip
        flow = st.toggle("Flow between stages", value=True, key="flow", bind="query-params")
    step = last if asked is None else int(asked)
    measured = view.ask(load_bubble, attempt, members, read(ParallelFacts, view.manifest).schedule)
    bubble: Bubble | None = measured["bubble"] if measured else None
    if bubble is not None:
        _numbers(bubble)
        st.markdown(markdown_text(bubble.text, 600))
        st.caption(_basis(bubble))
    elif measured:
        empty_state(NOT_MEASURED.format(why=measured["why"]))
    pieces = view.ask(load_schedule, attempt, step, members)
    if pieces is None:
        return
    is_of_host = bool(measured) and measured["why"] == HOST_SPANS
    st.subheader(f"Step {step} as {'the hosts issued it' if is_of_host else 'it ran'}", anchor=False)
    if len(ints(pieces["stage"])):
        chart(
            figures.draw, pieces, flow=flow, key="schedule", what="Forwards and backwards of each stage",
            selected=(asked, *members),
        )  # fmt: skip
        st.caption("Numbers are microbatches. Clocks of different hosts may differ, which shifts the stages.")
    else:
        others = f" Attempt {attempt} is shown; others have other steps." if len(found) > 1 else ""
        empty_state(f"No span of a stage was recorded in step {step} of attempt {attempt}.{others}")
    if measured and measured["chosen"] is not None:
        _bubble(measured["chosen"])


def _bubble(bubble: Bubble) -> None:
    """Draw the bubble by rank and by step."""
    st.subheader("Bubble by rank", anchor=False)
    named = {
        f"rank {rank} (stage {', '.join(map(str, bubble.stages_by_rank[rank]))})": share
        for rank, share in list(bubble.idle_ratio_by_rank.items())[:64]
    }
    expected = bubble.expected_ratio
    chart(
        figures.idle, named, expected=expected, key="bubble", what="Idle share of each rank of the pipeline",
        selected=tuple(named),
    )  # fmt: skip
    if len(bubble.idle_ratio_by_step) > 1:
        st.subheader("Bubble by step", anchor=False)
        what = "Idle share of the pipeline over the steps"
        chart(
            figures.idle_by_step, bubble.idle_ratio_by_step, expected=expected, key="bubble-steps", what=what,
            selected=tuple(named),
        )  # fmt: skip


def _numbers(bubble: Bubble) -> None:
    ideal = "Bubble by the schedule's formula" if bubble.is_formula else "Bubble of the executed order"
    split = "Part of the bubble beyond the ideal; imbalance, communication, data and order add up to that excess."
    stages, microbatches = len(bubble.work_ms_by_stage), bubble.num_microbatches
    numbers = [
        ("Schedule", markdown_text(bubble.schedule, 24) or "–", f"{stages} × {microbatches}",
         f"{stages} stages, {microbatches} microbatches."),
        ("Bubble", units.percent(bubble.idle_ratio), None, "Share of the pipeline's time in which its ranks are idle."),
        ("Ideal", units.percent(bubble.expected_ratio), None, f"{ideal} with equal stages."),
        ("Imbalance", units.percent(bubble.imbalance_ratio), _heaviest(bubble), split),
        ("Communication", units.percent(bubble.communication_ratio), None, split),
        ("Data", units.percent(bubble.data_ratio), None, split),
        *([("Order", units.percent(bubble.order_ratio), None, split)] if abs(bubble.order_ratio) >= 0.001 else []),
        ("Time", units.duration(bubble.total_ms / 1e3), None, "Time of the pipeline per step."),
    ]  # fmt: skip
    tiles(numbers, key="pipeline")


def _basis(bubble: Bubble) -> str:
    pipelines = f" and {bubble.num_pipelines} pipelines" if bubble.num_pipelines > 1 else ""
    return (
        f"Means over {bubble.num_steps} typical steps{pipelines}. Bubble: idle share from the first stage's data "
        "loading to the last backward."
    )


def _heaviest(bubble: Bubble) -> str | None:
    return None if bubble.heaviest_stage is None else f"stage {bubble.heaviest_stage}"
