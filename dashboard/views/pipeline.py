"""A pipeline as it ran: the schedule of a step, microbatch by microbatch, and the bubble of each stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import streamlit as st

from analyzers.bubble import expected_idle
from analyzers.report.figures import schedule as figures
from analyzers.source import Source, ints
from analyzers.stage_balance import StageBalancePolicy, measured_steps
from analyzers.wait_split import pipelines

from .. import queries, units
from ..frame import View, framed
from ..show import chart, nothing, said, tiles

__all__ = ["pipeline"]


def load_pipelines(source: Source) -> dict[str, Any]:
    """Pipelines of the newest attempt that has one, and its newest whole step."""
    found = pipelines(source) if source.has("ranks") and source.has("spans") else []
    if not found:
        return {"members": []}
    attempt = max(number for number, _ in found)
    ((last,),) = source.rows(
        "SELECT max(step) FROM steps WHERE attempt = ? AND duration_ns IS NOT NULL AND rank >= 0", [attempt]
    )
    return {"attempt": attempt, "members": [tuple(of) for number, of in found if number == attempt], "last": last}


def load_schedule(source: Source, attempt: int, step: int, members: tuple[int, ...]) -> Any:
    """Spans of one step."""
    return queries.schedule(source, attempt, step, members)


def load_idle(source: Source, attempt: int, members: tuple[int, ...]) -> dict[str, Any]:
    """Idle share of each rank, the median over steps, and of all together."""
    steps = measured_steps(source, attempt, members, StageBalancePolicy(min_steps=1, max_steps=60))
    if not steps:
        return {}
    ((microbatches,),) = source.rows("SELECT max(microbatch) + 1 FROM spans WHERE attempt = ?", [attempt])
    return {
        "ranks": {rank: float(np.median([step.ranks[rank].idle_ratio for step in steps])) for rank in members},
        "stages": {rank: sorted(steps[-1].ranks[rank].busy_ns_by_stage) for rank in members},
        "all": float(np.median([step.idle_ratio for step in steps])), "num_steps": len(steps),
        "total_ms": float(np.median([step.total_ns for step in steps])) / 1e6, "microbatches": int(microbatches or 1),
    }  # fmt: skip


@framed("Pipeline")
def pipeline(view: View) -> None:
    """One pipeline of the run, one of its steps."""
    found = view.ask(load_pipelines)
    if found is None:
        return
    if not found["members"] or found["last"] is None:
        nothing("This run has no pipeline.", "A pipeline is asked for by `parallel.pp`, see docs/parallelism.md.")
        return
    with st.container(horizontal=True, gap="small", vertical_alignment="bottom"):
        members = found["members"][0]
        if len(found["members"]) > 1:
            members = st.selectbox(
                "Pipeline of ranks", found["members"], key="pipeline", width=260,
                format_func=lambda ranks: ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else ""),
            )  # fmt: skip
        asked = st.number_input(
            "Step", min_value=0, value=None, step=1, key="pipeline-step", width=200,
            placeholder=f"newest ({found['last']})",
        )  # fmt: skip
        flow = st.toggle("Flow between stages", value=True, key="flow")
    step = found["last"] if asked is None else int(asked)
    idle = view.ask(load_idle, found["attempt"], members)
    if idle:
        _numbers(view, idle, len(members))
    pieces = view.ask(load_schedule, found["attempt"], step, members)
    if pieces is None:
        return
    st.subheader(f"Step {step} as it ran", anchor=False)
    if len(ints(pieces["stage"])):
        chart(
            figures.draw, pieces, flow=flow, key="schedule", what="Forwards and backwards of each stage",
            selected=(asked, *members),
        )  # fmt: skip
        st.caption("Numbers are microbatches. Clocks of other hosts may differ: then stages are shifted to each other.")
    else:
        nothing(f"No span of a stage was recorded in step {step}.")
    if idle:
        st.subheader("Bubble by rank", anchor=False)
        named = {
            f"rank {rank} (stage {', '.join(map(str, idle['stages'][rank]))})": share
            for rank, share in list(idle["ranks"].items())[:64]
        }
        expected = _expected(view, idle, len(members))
        chart(
            figures.idle, named, expected=expected, key="bubble", what="Idle share of each rank of the pipeline",
            selected=members,
        )  # fmt: skip
        st.caption(
            f"Median over {idle['num_steps']} steps. Bubble: idle share from the first forward to the last backward."
        )


def _expected(view: View, idle: dict[str, Any], ranks: int) -> float | None:
    stages = max((len(own) for own in idle["stages"].values()), default=1)
    return expected_idle(_schedule_name(view), ranks=ranks, microbatches=idle["microbatches"], stages_per_rank=stages)


def _schedule_name(view: View) -> str:
    config = view.manifest.get("config")
    parallel = config.get("parallel") if isinstance(config, dict) else None
    name = parallel.get("schedule") if isinstance(parallel, dict) else ""
    return name if isinstance(name, str) else ""


def _numbers(view: View, idle: dict[str, Any], ranks: int) -> None:
    expected = _expected(view, idle, ranks)
    numbers = [
        ("Schedule", said(_schedule_name(view), 24) or "–"), ("Stages", str(sum(map(len, idle["stages"].values())))),
        ("Microbatches", str(idle["microbatches"])), ("Bubble", units.percent(idle["all"])),
        ("Ideal bubble", units.percent(expected)), ("Pipeline's time", units.duration(idle["total_ms"] / 1e3)),
    ]  # fmt: skip
    tiles([(name, value, None, None) for name, value in numbers], key="pipeline")
