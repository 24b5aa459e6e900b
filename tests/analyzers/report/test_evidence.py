"""The proof of each kind of finding: that its figure holds the numbers that prove it, who and since when."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

import analyzers
from analyzers.finding import Finding
from analyzers.kinds import KINDS
from analyzers.report.evidence import drawings, figures_of
from tests.analyzers.memory_store import MemoryStore

MS, S, MIB, GIB = 10**6, 10**9, 1 << 20, 1 << 30
RANKS, STEPS = 6, 40


def finding(kind: str, **more: Any) -> Finding:
    return Finding(analyzer="x", kind=kind, severity="warning", status="fired", summary="", **more)


def proof(store: MemoryStore, kind: str, number: int = 0, **more: Any) -> go.Figure:
    """The figure of that number of a finding."""
    return list(drawings(store, finding(kind, **more)))[number].figure


def lines(figure: go.Figure) -> dict[str, dict[Any, Any]]:
    """{name of a line or bars: {x: y}}."""
    return {str(t.name): dict(zip(t.x, t.y, strict=True)) for t in figure.data if t.name}


def bars(figure: go.Figure) -> dict[str, float]:
    """{label of a bar, without its emphasis: length}."""
    (trace,) = figure.data
    return {str(y).replace("<b>", "").replace("</b>", ""): x for x, y in zip(trace.x, trace.y, strict=True)}


def onset(figure: go.Figure) -> float:
    """Where the dotted line stands."""
    (line,) = [shape for shape in figure.layout.shapes if shape.line.dash == "dot" and shape.x0 == shape.x1]
    return float(line.x0)


def steps_of(**columns: Any) -> MemoryStore:
    """`RANKS` ranks, `STEPS` steps; a column is a number or a function of rank and step."""
    store = MemoryStore()
    usual: dict[str, Any] = {"duration_ns": 50 * MS, "data_ns": 2 * MS, "forward_ns": 15 * MS, "backward_ns": 25 * MS,
                             "optimizer_ns": 5 * MS, "collective_wait_ns": 3 * MS, "loss": 2.0, "grad_norm": 1.0,
                             "committed": True}  # fmt: skip
    store.add("steps", [
        {"attempt": 0, "rank": rank, "step": step, "start_ns": step * 50 * MS,
         **{name: value(rank, step) if callable(value) else value for name, value in (usual | columns).items()}}
        for rank in range(RANKS) for step in range(1, STEPS + 1)
    ])  # fmt: skip
    return store


def place(store: MemoryStore, **columns: Any) -> None:
    store.add("ranks", [
        {"attempt": 0, "rank": rank, "wall_ns": 1, "host": "a",
         **{name: value(rank) for name, value in columns.items()}}
        for rank in range(RANKS)
    ])  # fmt: skip


def health(store: MemoryStore, device: str = "GPU-{}", **columns: Any) -> None:
    """A minute of readings of three devices, or hosts; a column is a function of the device's number and the second."""
    store.add("health", [
        {"attempt": 0, "rank": -1, "sample_ns": 1000 * S + second * S, "node": "a" if "{}" in device else f"n{one}",
         "device": device.format(one), **{name: value(one, second) for name, value in columns.items()}}
        for one in range(3) for second in range(60)
    ])  # fmt: skip


def test_every_kind_that_a_finding_names_is_known_and_drawn_or_not() -> None:
    kinds = set()
    for path in Path(analyzers.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Finding", "Finding.advise", "_device"):
                named = [word.value for word in node.keywords if word.arg == "kind"]
                place = 0 if ast.unparse(node.func) == "_device" else 1
                named += node.args[place : place + 1]
                kinds |= {word.value for word in named if isinstance(word, ast.Constant)}
    assert {"straggler", "slow_startup", "gpu_throttled"} <= kinds
    assert kinds <= set(KINDS)
    assert all(figures_of(kind.name) for kind in KINDS.values() if kind.drawn)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS.values() if kind.drawn])
def test_a_proof_without_its_records_is_left_out(kind: str) -> None:
    empty = MemoryStore()
    for cause in ("", "communication", "disk", "thermal", "ecc", "buckets", "workers", "out_of_memory", "gpu_clock"):
        assert not list(drawings(empty, finding(kind, ranks=(1,), first_step=3, attempt=0, cause=cause)))
    for table in ("steps", "spans", "collectives", "gradients", "fingerprints", "health", "checkpoints", "events"):
        empty.drop(table)
    assert not list(drawings(empty, finding(kind, ranks=(1,), first_step=3)))


@pytest.mark.parametrize("kind", ["memory_growth", "memory_imbalance"])
def test_memory_of_the_named_rank_rises_above_the_others(kind: str) -> None:
    store = steps_of(memory_bytes=lambda rank, step: (100 + (2 * step if rank == 4 else rank)) * MIB)
    figure = proof(store, kind, ranks=(4,), first_step=1, attempt=0)
    shown = lines(figure)
    assert shown["rank 4"] == {step: 100 + 2 * step for step in range(1, STEPS + 1)}
    assert set(shown["others, median"].values()) == {102.0}, "the median of ranks 0, 1, 2, 3 and 5"


def test_memory_that_grows_everywhere_is_shown_of_the_ranks_it_grows_on() -> None:
    store = steps_of(memory_bytes=lambda rank, step: (100 + step + rank) * MIB)
    shown = lines(proof(store, "memory_growth", first_step=1, attempt=0, evidence={"growing_ranks": list(range(6))}))
    assert {f"rank {rank}" for rank in range(6)} == set(shown)
    assert shown["rank 5"][40] == 145


def test_memory_of_a_full_device_is_shown_beside_its_capacity() -> None:
    store = MemoryStore()
    health(store, memory_used_bytes=lambda one, s: (60 + 19 * (one == 1 and s == 50)) * GIB,
           memory_total_bytes=lambda *_: 80 * GIB)  # fmt: skip
    figure = proof(store, "memory_limit", evidence={"highest_bytes": 79 * GIB, "total_bytes": 80 * GIB})
    assert max(lines(figure)["a GPU-1"].values()) == 79
    assert set(lines(figure)["others, median"].values()) == {60}
    assert [shape.y0 for shape in figure.layout.shapes] == [80]


@pytest.mark.parametrize(
    ("kind", "cause", "column"),
    [("gpu_memory_errors", "uncorrected", "ecc_uncorrected_total"), ("link_errors", "pcie", "pcie_replay_total"),
     ("gpu_memory_errors", "corrected", "ecc_corrected_total"), ("link_errors", "nvlink", "nvlink_errors_total"),
     ("gpu_memory_errors", "remapped", "remapped_rows_total")],
)  # fmt: skip
def test_a_counter_of_the_named_device_rises_at_the_onset(kind: str, cause: str, column: str) -> None:
    store = MemoryStore()
    health(store, **{column: lambda one, second: 7 + 5 * (one == 2 and second >= 30)})
    figure = proof(store, kind, cause=cause, evidence={"node": "a", "device": "GPU-2"})
    shown = lines(figure)
    assert (shown["a GPU-2"][29.0], shown["a GPU-2"][30.0]) == (7, 12)
    assert set(shown["others, median"].values()) == {7}
    assert onset(figure) == 30


@pytest.mark.parametrize(("cause", "column", "shown_as"), [
    ("ecc", "ecc_uncorrected_total", 1.0), ("hardware", "gpu_utilization_ratio", 100.0),
])  # fmt: skip
def test_an_xid_is_marked_in_the_reading_that_goes_with_it(cause: str, column: str, shown_as: float) -> None:
    store = MemoryStore()
    health(store, **{column: lambda one, second: 1.0 * (one == 1 and second >= 20)})
    told = {"node": "a", "device": "GPU-1", "first_wall_ns": 1020 * S}
    figure = proof(store, "xid", cause=cause, evidence=told)
    assert lines(figure)["a GPU-1"][20.0] == shown_as
    assert set(lines(figure)["others, median"].values()) == {0}
    assert onset(figure) == 20


def test_a_throttled_gpu_is_shown_with_its_clock_and_heat() -> None:
    store = MemoryStore()
    hot = lambda one, second: one == 0 and second >= 30  # noqa: E731
    health(store, throttle_reasons=lambda o, s: 4 + 32 * hot(o, s), sm_clock_hertz=lambda o, s: 1.9e9 - 7e8 * hot(o, s),
           temperature_celsius=lambda o, s: 60.0 + 30 * hot(o, s))  # fmt: skip
    told = {"node": "a", "device": "GPU-0", "reason_bit": 32}
    share, clock, heat = list(drawings(store, finding("gpu_throttled", cause="thermal", evidence=told)))
    assert onset(share.figure) == 30
    assert lines(share.figure)["a GPU-0"][59.0] == 100
    assert lines(clock.figure)["a GPU-0"][59.0] == 1200
    assert lines(heat.figure)["others, median"][59.0] == 60


def test_a_host_under_pressure() -> None:
    store = MemoryStore()
    health(store, "host", disk_free_bytes=lambda one, s: (100 - (1.6 * s if one == 1 else 0)) * GIB,
           load_1m=lambda one, _: 40.0 if one == 1 else 3.0)  # fmt: skip
    disk = proof(store, "host_pressure", cause="disk", evidence={"node": "n1"})
    assert min(lines(disk)["n1"].values()) == pytest.approx(100 - 1.6 * 59)
    assert [shape.y0 for shape in disk.layout.shapes] == [5]
    queue = proof(store, "host_pressure", cause="run_queue", evidence={"node": "n1", "num_cpus": 16})
    assert (set(lines(queue)["n1"].values()), queue.layout.shapes[0].y0) == ({40.0}, 16)


def pipeline(heavy: int) -> MemoryStore:
    """Three stages on ranks 0 to 2; one takes twice as long."""
    store = MemoryStore()
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "host": "a", "pp": rank} for rank in range(3)])
    store.add("spans", [
        {"attempt": 0, "rank": rank, "step": step, "kind": kind, "stage": rank, "microbatch": one,
         "start_ns": (1000 * step + 100 * one + 40 * begin) * MS,
         "end_ns": (1000 * step + 100 * one + 40 * begin + (20 if rank == heavy else 10)) * MS}
        for step in range(1, 20) for rank in range(3) for one in range(2)
        for kind, begin in (("forward", rank), ("backward", 10 - rank))
    ])  # fmt: skip
    return store


def test_a_heavy_stage_beside_the_others_and_a_step_as_it_ran() -> None:
    told = finding("stage_imbalance", ranks=(1,), attempt=0)
    work, ran = list(drawings(pipeline(1), told))
    assert bars(work.figure) == {"rank 0 (pp rank 0)": 40, "rank 1 (pp rank 1)": 80, "rank 2 (pp rank 2)": 40}
    assert work.figure.data[0].y[1].startswith("<b>")
    assert onset(work.figure) == 40
    forward = next(trace for trace in ran.figure.data if trace.name == "forward")
    assert {round(length) for length, stage in zip(forward.x, forward.y, strict=True) if stage == 1} == {20}
    idle, _ = list(drawings(pipeline(1), finding("bubble", attempt=0, evidence={"idle_expected_ratio": 0.25})))
    assert onset(idle.figure) == 25


def test_waiting_for_data_beside_the_step() -> None:
    late = lambda _, step: (30 if step >= 21 else 2) * MS  # noqa: E731
    figure = proof(steps_of(data_ns=late), "data_bound", first_step=21, attempt=0)
    shown = lines(figure)
    assert (shown["waiting for data"][20], shown["waiting for data"][21]) == (2, 30)
    assert shown["rest of the step"][21] == 20
    assert onset(figure) == 21


def test_a_drop_of_throughput_shows_which_part_grew() -> None:
    figure = proof(
        steps_of(forward_ns=lambda _, step: (15 + 20 * (step >= 25)) * MS), "throughput", first_step=25, attempt=0
    )
    shown = lines(figure)
    assert shown["compute"][25] - shown["compute"][24] == 20
    assert shown["data"][25] == shown["data"][24]
    assert onset(figure) == 25


def calls(slow_group: str = "", factor: float = 1.0, since: int = 1) -> MemoryStore:
    """Two groups of dimension dp and one of tp, of two ranks each; one may be slow."""
    store = steps_of()
    groups = {"dp:0-1": (0, 1), "dp:2-3": (2, 3), "tp:4-5": (4, 5)}
    store.add("collectives", [
        {"attempt": 0, "rank": rank, "step": step, "seq": step, "bytes": 4 * MIB, "issue_ns": step * 50 * MS,
         "end_ns": step * 50 * MS + int((factor if group == slow_group and step >= since else 1) * MS),
         "wait_ns": 1 * MS, "process_group": group, "op": "all_reduce", "phase": "backward"}
        for step in range(1, STEPS + 1) for group, members in groups.items() for rank in members
    ])  # fmt: skip
    return store


def test_a_slow_link_beside_the_links_next_to_it() -> None:
    told = {"process_groups": ["dp:2-3"], "op": "all_reduce", "bytes": 4 * MIB}
    store = calls("dp:2-3", factor=4, since=20)
    figure = proof(store, "straggler", cause="communication", ranks=(2, 3), first_step=20, attempt=0, evidence=told)
    shown = lines(figure)
    assert (shown["dp:2-3"][15], shown["dp:2-3"][20]) == (1, 4)
    assert set(shown["others, median"].values()) == {1}, "tp:4-5 is of another dimension, dp:0-1 stays as it was"
    assert onset(figure) == 20


def test_a_slow_dimension_beside_the_best() -> None:
    told = {"process_group": "tp:4-5", "best_process_group": "dp:0-1"}
    figure = proof(calls("tp:4-5", factor=8), "low_bandwidth", attempt=0, evidence=told)
    best, slow = (bars(figure)[f"all_reduce of 4 MiB in {group}"] for group in ("dp:0-1", "tp:4-5"))
    assert best / slow == pytest.approx(8)
    assert [y for y in figure.data[0].y if y.startswith("<b>")] == ["<b>all_reduce of 4 MiB in tp:4-5</b>"]
    assert onset(figure) == pytest.approx(best)


def test_small_buckets_beside_what_their_bytes_need() -> None:
    shown = bars(proof(calls("dp:2-3", factor=5), "small_buckets", cause="all_reduce", attempt=0))
    name = "all_reduce of 4 MiB in dp:2-3"
    assert shown[f"{name}, measured"] == pytest.approx(5 * shown[f"{name}, transfer only"])


def test_exposed_communication_of_each_step() -> None:
    shown = lines(proof(calls(), "exposed_communication", attempt=0))
    assert shown["exposed: transfer"] == {step: pytest.approx(1) for step in range(1, STEPS + 1)}


def test_a_silent_node_stays_behind() -> None:
    store = steps_of()
    place(store, node_rank=lambda rank: rank // 3)
    store.connection.execute("DELETE FROM steps WHERE rank >= 3 AND step > 20")
    store.event("node_silent", step=20, wall_ns=2 * S, node_rank=1, ranks=[3, 4, 5], silent_s=1.0)
    figure = proof(store, "node_silent", ranks=(3, 4, 5), first_step=20, evidence={"node_rank": 1, "attempt": 0})
    shown = lines(figure)
    assert (max(shown["node 1"].values()), max(shown["node 0"].values())) == (20, 40)
    assert onset(figure) == pytest.approx(2 - 1 - 0.05)


def test_the_clock_of_a_slow_rank_and_the_memory_of_one_that_ran_out() -> None:
    store = steps_of(memory_bytes=lambda rank, _: (900 if rank == 1 else 100) * MIB)
    place(store, device_uuid=lambda rank: f"GPU-{rank}")
    health(store, sm_clock_hertz=lambda one, _: 1.2e9 if one == 1 else 1.98e9)
    shown = list(drawings(store, finding("straggler", cause="gpu_clock", ranks=(1,), first_step=1, attempt=0)))
    assert set(lines(shown[-1].figure)["a GPU-1"].values()) == {1200}
    assert set(lines(proof(store, "rank_lost", cause="out_of_memory", ranks=(1,), attempt=0))["rank 1"].values()) == {
        900
    }


@pytest.mark.parametrize(("cause", "what"), [
    ("workers", "waiting for data"), ("compression", "error"), ("evaluation", "None"),
])  # fmt: skip
def test_advice_on_a_setting_shows_what_the_setting_costs(cause: str, what: str) -> None:
    store = steps_of(compression_error=0.8, evaluate_ns=20 * MS)
    (shown,) = drawings(store, finding("configuration", cause=cause))
    assert what in {str(trace.name) for trace in shown.figure.data}
