"""Figures: what they show, and how little they send of however much there is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyzers.account.goodput import CATEGORIES, measure
from analyzers.communication import bandwidth
from analyzers.diagnose import Diagnosis
from analyzers.figures import course, loss
from analyzers.figures.drawing import theme
from analyzers.figures.drawing.reduce import MAX_POINTS, extremes
from analyzers.figures.drawing.sampling import sampled
from analyzers.figures.ranks import heatmap, rank_step, straggler
from analyzers.figures.time import activity, collectives, goodput, timeline
from analyzers.finding import Finding
from analyzers.hangs import wait_for_figure as waitfor
from analyzers.hangs.culprits import find_culprits
from analyzers.hangs.wait_graph import waits_of
from analyzers.report.html import diagnosis_page
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.run.records.event_log import EventLog
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.report.hostile import SCRIPT
from tests.factories import make_run


def test_a_reduced_line_keeps_every_extreme() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(300_000).cumsum()
    values[123_456], values[222_222], values[7] = 1e6, -1e6, np.nan
    keep = extremes(values)
    assert len(keep) <= MAX_POINTS
    assert {0, 123_456, 222_222, 7, 299_999} <= set(keep.tolist())
    assert (np.diff(keep) > 0).all()
    kept = set(keep.tolist())
    for piece in np.array_split(np.arange(len(values)), (MAX_POINTS - 2) // 3):
        assert {piece[np.nanargmin(values[piece])], piece[np.nanargmax(values[piece])]} <= kept
    assert extremes(values[:100]).tolist() == list(range(100))
    assert len(extremes(np.full(100_000, np.nan))) <= MAX_POINTS


def big_store(ranks: int, steps: int) -> MemoryStore:
    store = MemoryStore()
    store.connection.execute(
        f"""
        INSERT INTO steps (attempt, rank, step, start_ns, duration_ns, data_ns, forward_ns, backward_ns, optimizer_ns,
                           collective_wait_ns, loss, grad_norm, committed)
        SELECT 0, r, s, s * 1000000, 900000 + (r = 700)::INT * 500000, 0, 900000 + (r = 700)::INT * 500000, 0, 0,
               1000, 2 + 1.0 / s, 1, true
        FROM range({ranks}) a(r), range(1, {steps + 1}) b(s)
        """
    )
    return store


def test_a_large_run_is_reduced_to_screen_resolution_and_keeps_its_slow_rank() -> None:
    store = big_store(900, 1000)
    matrix = rank_step.rank_step(store, "own work")
    assert max(matrix.values.shape) <= 400
    assert matrix.is_reduced
    rows = np.flatnonzero(matrix.values.max(axis=1) > 1.2)
    assert [int(matrix.ranks[row]) <= 700 < int(matrix.ranks[row]) + matrix.ranks_per_cell for row in rows] == [True]
    figure = heatmap.draw(matrix)
    assert np.asarray(figure.data[0].z).shape == matrix.values.shape
    against = rank_step.rank_against_others(store, 0, 700)
    assert np.median(against["own"]) > 1.3 * np.median(against["high"])
    ranked = straggler.ranking(rank_step.own_work(store), culprits=(700,))
    assert "the 24 slowest of" in ranked.layout.xaxis.title.text
    assert ranked.data[0].y[0] == "<b>rank 700</b>"
    assert len(ranked.data[0].y) <= 24


def test_the_report_shows_ranks_over_their_peers_as_the_page_does() -> None:
    store = big_store(8, 100)
    store.connection.execute(
        "UPDATE steps SET forward_ns = 1200000, duration_ns = 1200000 WHERE rank = 3 AND step >= 60"
    )
    slow = Finding(
        analyzer="x", kind="straggler", severity="warning", status="fired", summary="", ranks=(3,), first_step=60
    )
    page = diagnosis_page._Page(store, Diagnosis(verdict="", findings=(slow,), run={}))
    (section,) = page._ranks()
    assert section.figures[0].title == "own work"
    shown = json.loads(str(section.figures[0].json))
    assert "over peers" in shown["data"][0]["colorbar"]["title"]["text"]
    assert [note["text"] for note in shown["layout"]["annotations"]] == ["rank 3: straggler, step 60"]


def test_the_loss_shows_what_was_discarded_and_what_happened(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=40, nan={1: 12})
    make_run(tmp_path, ranks=2, steps=20, run=run, attempt=1, first_step=31, loss=lambda step: 3.0)
    found = Finding(
        analyzer="x", kind="hang", severity="critical", status="fired", summary=SCRIPT, first_step=5, last_step=9
    )
    with Store.open(run) as store:
        curve = course.loss_curve(store)
        figure = loss.draw(curve, course.marks(store), [found])
    lines = {trace.name: trace for trace in figure.data}
    assert {"loss", "discarded", "gradient norm", "restart"} <= set(lines)
    assert 12 not in lines["loss"].x
    assert [y for x, y in zip(lines["loss"].x, lines["loss"].y, strict=True) if x >= 31] == [3.0] * 20
    assert (figure.layout.shapes[0].x0, figure.layout.shapes[0].x1) == (4.5, 9.5)
    assert "<script" not in figure.to_json().replace("\\u003c", "<")


def test_a_timeline_leaves_open_what_never_ended(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, ranks=3, steps=20, hang={1: 20})) as store:
        pieces = activity.timeline(store, attempt=0, first_step=19, last_step=20, ranks=[0, 1, 2])
        few = activity.timeline(store, attempt=0, first_step=1, last_step=20, ranks=[0, 1, 2], limit=20)
    assert {(piece.rank, piece.kind) for piece in pieces if piece.end_ms is None and piece.is_call} == {
        (0, "all_reduce"), (2, "all_reduce"),
    }  # fmt: skip
    assert len(few) <= 20
    assert {piece.rank for piece in few if piece.end_ms is None and piece.is_call} == {0, 2}  # those above all
    figure = timeline.draw(pieces, ranks=[0, 1, 2])
    (in_flight,) = [trace for trace in figure.data if trace.name == "all_reduce (in flight)"]
    right = figure.layout.xaxis.range[1]
    assert [base + length for base, length in zip(in_flight.base, in_flight.x, strict=True)] == pytest.approx(
        [right] * 2
    )


def test_a_timeline_names_its_steps_and_fades_spans_outside_the_search() -> None:
    pieces = [
        activity.TimelineItem(
            rank=rank, kind=kind, is_call=kind == "all_gather", start_ms=at + rank, end_ms=at + 5, step=step
        )
        for step, at in ((7, 10.0), (8, 30.0))
        for kind in ("forward", "all_gather")
        for rank in range(2)
    ]
    figure = timeline.draw(pieces, ranks=[0, 1], find="all_gather rank 1")
    assert [(note.text, note.x) for note in figure.layout.annotations] == [("step 7", 10.0), ("step 8", 30.0)]
    assert [line.x0 for line in figure.layout.shapes] == [10.0, 30.0]
    shown = {trace.name: [value == 1 for value in trace.marker.opacity] for trace in figure.data}
    assert shown == {
        "forward": [False] * 4, "all_gather": [False, True, False, True], "between phases": [False] * 2
    }  # fmt: skip
    assert {trace.marker.opacity for trace in timeline.draw(pieces).data} == {1.0}


def test_a_timeline_shows_what_a_rank_spends_between_two_phases() -> None:
    phases = (("forward", 0.0, 10.0), ("backward", 10.1, 30.0), ("optimizer", 70.0, 75.0))
    pieces = [
        activity.TimelineItem(rank=0, kind=kind, is_call=False, start_ms=start, end_ms=end, step=7)
        for kind, start, end in phases
    ]
    (between,) = [trace for trace in timeline.draw(pieces).data if trace.name == "between phases"]
    assert (between.base, between.x) == ((30.0,), (40.0,))


def test_a_timeline_follows_microbatches_within_each_pipeline() -> None:
    store = MemoryStore()
    store.add("ranks", [
        {"attempt": 0, "rank": rank, "wall_ns": 1, "host": "a", "pp": rank // 2, "dp_shard": rank % 2}
        for rank in range(4)
    ])  # fmt: skip
    ms = 1_000_000
    store.add("spans", [
        {"attempt": 0, "rank": rank, "step": 7, "kind": kind, "stage": rank // 2, "microbatch": microbatch,
         "start_ns": begin * ms, "end_ns": (begin + 10) * ms}
        for rank in range(4)
        for microbatch in range(2)
        for kind, begin in (
            ("forward", 100 + 20 * (rank // 2) + 10 * microbatch),
            ("backward", 200 - 20 * (rank // 2) + 10 * microbatch),
        )
    ])  # fmt: skip
    pieces = activity.timeline(store, attempt=0, first_step=7, last_step=7, ranks=range(4))
    down, up = (trace for trace in timeline.draw(pieces).data if trace.name == "flow")
    assert sorted(zip(down.x[0::3], down.x[1::3], strict=True)) == [(10, 20), (10, 20), (20, 30), (20, 30)]
    assert sorted(zip(up.x[0::3], up.x[1::3], strict=True)) == [(90, 100), (90, 100), (100, 110), (100, 110)]
    rows = {(round(a), round(b)) for a, b in zip(down.y[0::3], down.y[1::3], strict=True)}
    assert rows == {(0, 2), (1, 3)}, "shard 0 is ranks 0 and 2, shard 1 is ranks 1 and 3"


def test_medians_of_a_long_run_come_from_stretches_of_its_steps() -> None:
    store = big_store(40, 5_000)
    assert sampled(store, 0, 1 << 60) == f"step BETWEEN 0 AND {1 << 60}"
    condition = sampled(store, 1, 5_000, max_rows=20_000)
    steps = [step for (step,) in store.rows(f"SELECT DISTINCT step FROM steps WHERE {condition} ORDER BY step")]
    assert steps[0] == 1
    assert steps[-1] == 5_000
    assert 10_000 <= 40 * len(steps) <= 20_000
    assert max(np.diff(steps)) < 5_000 / 12
    work = rank_step.own_work(store)
    assert work["rank"].tolist() == list(range(40))
    assert set(work["forward"]) == {0.9}


def test_the_wait_for_graph_points_at_the_culprit(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, ranks=40, steps=3, hang={7: 3})) as store:
        view = take_snapshot(store, 0, EventLog.load(store, SNAPSHOT_EVENTS))
    waits = waits_of(view)
    assert {(wait.rank, wait.awaited) for wait in waits} == {(rank, 7) for rank in range(40) if rank != 7}
    assert len(waits_of(view, limit=5)) == 5
    figure = waitfor.draw(view, find_culprits(view))
    nodes = {trace.name: set(trace.text) for trace in figure.data}
    assert nodes["waited for"] == {"7"}
    assert len(nodes["waits"]) == 23
    assert any("16 more ranks" in (note.text or "") for note in figure.layout.annotations)


def test_the_waterfall_ends_where_training_begins(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, ranks=3, steps=30)) as store:
        account = measure(store)
        calls = bandwidth.call_columns(store)
    assert account is not None
    (bars,) = goodput.waterfall(account).data
    begins = [min(base, base + length) for base, length in zip(bars.base, bars.x, strict=True)]
    lengths = [abs(length) for length in bars.x]  # a bar on the right is drawn to the left, where its text has room
    assert (begins[0], lengths[0]) == (0, account.wall_s)
    for i in range(1, len(begins) - 1):  # each begins where the one above ends
        above = begins[i - 1] if i > 1 else account.wall_s
        assert begins[i] + lengths[i] == pytest.approx(above)
    assert lengths[-1] == pytest.approx(begins[-2], rel=0.02)
    assert bars.y[-1] == "training"
    unknown = replace(account, seconds={**account.seconds, "training": 0.0, "unmeasured": 1.0})
    assert "training" not in goodput.waterfall(unknown).data[0].y, "not measured is not zero"
    stacked = goodput.by_rank(account).data
    assert sum(trace.x[0] for trace in stacked) == pytest.approx(account.wall_s, rel=0.01)
    assert set(CATEGORIES) == set(theme.CATEGORY)
    (points,) = collectives.draw(calls).data
    assert points.y[0] == pytest.approx((4 << 20) * 2 * 2 / 3 / 1e-3, rel=1e-6)  # 2 (N-1)/N of 4 MiB in 1 ms


@pytest.mark.parametrize("dark", [True, False])
def test_a_figure_has_a_template_only_when_it_is_shown(dark: bool) -> None:
    figure = theme.new_figure(x="step")
    plain: Any = figure.to_plotly_json()
    assert not plain["layout"].get("template", {}).get("layout")
    figure.update_layout(template=theme.template(dark=dark))
    assert figure.layout.template.layout.font.color
    assert theme.label(SCRIPT + "\u202e\x1b").startswith("&lt;/script&gt;")
    assert len(theme.label("x" * 10_000)) == theme.MAX_LABEL


@pytest.mark.parametrize(("number", "symbol"), [(24, "triangle-up-open"), (100, "line-ns-open")])
def test_marks_that_would_cover_each_other_are_short_lines(number: int, symbol: str) -> None:
    curve = {"step": np.arange(2000), "loss": np.linspace(9, 3, 2000), "grad_norm": np.ones(2000),
             "kept": np.ones(2000, dtype=bool)}  # fmt: skip
    marks = [course.Mark(kind="checkpoint", step=20 * place, text="") for place in range(number)]
    (drawn,) = (trace for trace in loss.draw(curve, marks).data if trace.name == "checkpoint")
    assert drawn.marker.symbol == symbol
