"""The figures that prove findings about numbers: replicas, NaN, gradients, saves, start, scale, experts."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.report.evidence import drawings
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.report.test_evidence import MS, RANKS, bars, calls, finding, lines, onset, proof, steps_of


def test_the_rank_that_differs_from_its_replicas_is_shown_with_its_onset() -> None:
    store = MemoryStore()
    store.add("fingerprints", [
        {"attempt": 0, "rank": rank, "step": step, "taken_ns": step, "replica_group": "dp:0-3", "tensor": "(all)",
         "hash": step + 1000 * (rank == 2 and step >= 30), "expected_hash": step}
        for rank in range(4) for step in (10, 20, 30, 40)
    ])  # fmt: skip
    figure = proof(store, "replica_mismatch", ranks=(2,), first_step=30, attempt=0)
    (grid,) = figure.data
    states = dict(zip(grid.y, np.asarray(grid.z).tolist(), strict=True))
    assert states == {"rank 0": [0] * 4, "rank 1": [0] * 4, "rank 2": [0, 0, 2, 2], "rank 3": [0] * 4}
    store.connection.execute("UPDATE fingerprints SET expected_hash = NULL")
    (grid,) = proof(store, "fingerprint_chain_broken", ranks=(2,), first_step=30, attempt=0).data
    assert np.asarray(grid.z)[2].tolist() == [0, 0, 1, 1]


def test_two_replicas_that_differ_are_both_shown_so() -> None:
    store = MemoryStore()
    store.add("fingerprints", [
        {"attempt": 0, "rank": rank, "step": 10, "taken_ns": 1, "replica_group": "dp:0-1", "tensor": "(all)",
         "hash": rank} for rank in range(2)
    ])  # fmt: skip
    (grid,) = proof(store, "replica_mismatch", ranks=(0, 1), first_step=10, attempt=0).data
    assert np.asarray(grid.z).tolist() == [[1], [1]]


def test_the_place_of_the_nan_is_shown() -> None:
    store = steps_of(nonfinite_count=lambda rank, step: 51 * (rank == 3 and step == 12))
    kept = {"ranks": (3,), "first_step": 12, "attempt": 0}
    (grid,) = proof(store, "non_finite", **kept).data
    assert (list(grid.y), np.asarray(grid.customdata)[0][list(grid.x).index("12")]) == (["rank 3"], 51)
    store.add("gradients", [
        {"attempt": 0, "rank": rank, "step": 12, "parameter": f"blocks.{block}.w", "norm": 1.0,
         "nonfinite_count": 17 * (rank == 3 and block == 1)}
        for rank in range(RANKS) for block in range(3)
    ])  # fmt: skip
    (grid,) = proof(store, "non_finite", **kept).data
    assert list(grid.y) == ["blocks.1.w"], "only what ever held one"
    assert dict(zip(grid.x, np.asarray(grid.customdata)[0], strict=True)) == {**dict.fromkeys("01245", 0), "3": 17}
    *_, around = drawings(store, finding("non_finite", **kept))
    assert around.title == "Loss and gradient norm around the finding"
    assert len(around.figure.layout.shapes) == 1
    assert not around.figure.layout.annotations, "a number would be that of another finding's card"


def test_the_rank_with_nonfinite_input_to_a_reduction_is_shown() -> None:
    store = calls()
    store.connection.execute("UPDATE collectives SET nonfinite = (rank = 3 AND step >= 12)")
    told = finding("non_finite", ranks=(3,), first_step=12, attempt=0)
    (grid,) = next(drawings(store, told)).figure.data
    states = {(rank, call): grid.z[i][j] for i, rank in enumerate(grid.y) for j, call in enumerate(grid.x)}
    assert states["rank 3", "all_reduce 12 of dp:2-3"] == 1
    assert states["rank 2", "all_reduce 12 of dp:2-3"] == 0
    assert {key for key, state in states.items() if state == 1} == {("rank 3", "all_reduce 12 of dp:2-3")}
    assert np.isnan(states["rank 0", "all_reduce 12 of dp:2-3"]), "it is no member"


@pytest.mark.parametrize(("kind", "norm"), [("vanishing_gradients", 1e-7), ("exploding_gradients", 1e7)])
def test_the_block_out_of_proportion_is_shown(kind: str, norm: float) -> None:
    store = MemoryStore()
    store.add("gradients", [
        {"attempt": 0, "rank": 0, "step": step, "parameter": f"blocks.{block}.w",
         "norm": norm if block == 2 and step >= 20 else 1.0 + block}
        for step in range(5, 45, 5) for block in range(4)
    ])  # fmt: skip
    figure = proof(store, kind, first_step=20, attempt=0, evidence={"blocks": ["blocks.2"]})
    shown = lines(figure)
    assert (shown["blocks.2"][15], shown["blocks.2"][20]) == (3, norm)
    assert set(shown["others, median"].values()) == {2}
    assert (onset(figure), figure.layout.yaxis.type) == (20, "log")


def test_a_gradient_that_a_device_changed() -> None:
    store = steps_of(local_grad_norm=lambda rank, step: 500.0 if (rank, step) == (1, 9) else 1.0)
    told = {"peak": 800.0, "peak_again": 0.5, "ratio": 1000.0}
    peaks, norm = list(drawings(store, finding("gradient_corrupted", ranks=(1,), first_step=9, evidence=told)))
    shown = bars(peaks.figure)
    assert shown == {"expected": 0.8, "first time": 800, "recomputed": 0.5}
    assert lines(norm.figure)["rank 1"][9] == 500


def test_saves_that_fail_stall_or_grow_old() -> None:
    store = steps_of()
    store.add("checkpoints", [
        {"attempt": 0, "rank": -1, "wall_ns": step, "step": step, "tier": "disk", "duration_ns": 300 * MS,
         "stall_ns": 20 * MS, "state": "failed" if step == 20 else "good"}
        for step in (5, 10, 20)
    ])  # fmt: skip
    shown = lines(proof(store, "checkpoint_failed", first_step=20))
    assert (set(shown["failed"]), shown["training stalled, disk"]) == ({20}, {5: 20, 10: 20})
    assert lines(proof(store, "checkpoint_cost"))["duration of the save, disk"] == {5: 300, 10: 300}
    old = proof(store, "checkpoint_age", first_step=10, evidence={"interval_steps": 5})
    age = lines(old)["age"]
    assert (age[4], age[5], age[9], age[10], age[40]) == (4, 0, 4, 0, 30)
    assert {shape.y0 for shape in old.layout.shapes if shape.y0 == shape.y1} == {5}
    assert onset(old) == 10


def test_the_pieces_of_a_start_are_shown() -> None:
    store = steps_of()
    store.event("run_started", wall_ns=0)
    store.event("attempt_started", wall_ns=1 * MS)
    store.add("ranks", [
        {"attempt": 0, "rank": rank, "wall_ns": (40 if rank == 2 else 10) * MS, "host": "a"} for rank in range(RANKS)
    ])  # fmt: skip
    (shown,) = drawings(store, finding("slow_startup", ranks=(2,), cause="imports", attempt=0))
    imports = next(trace for trace in shown.figure.data if trace.name == "processes and imports")
    seconds = dict(zip(imports.y, imports.x, strict=True))
    assert seconds["<b>rank 2</b>"] == pytest.approx(0.039)
    assert seconds["rank 0"] == pytest.approx(0.009)


def test_the_loss_scale_the_noise_and_the_state_that_was_loaded() -> None:
    store = MemoryStore()
    for step, value in ((30, 1024.0), (32, 512.0), (33, 256.0)):
        store.event("loss_scale", rank=0, step=step, scale=value)
    figure = proof(store, "loss_scale_collapse", first_step=30, attempt=0)
    assert lines(figure)["scale"] == {30: 1024, 32: 512, 33: 256}
    assert onset(figure) == 30
    course = [{"step": 10, "tokens": 500.0}, {"step": 20, "tokens": 4000.0}]
    figure = proof(store, "gradient_noise", evidence={"noise_scale_by_step": course, "batch_tokens": 100})
    assert (lines(figure)["noise scale"], figure.layout.shapes[0].y0) == ({10: 500, 20: 4000}, 100)
    store.add("ranks", [{"attempt": 1, "rank": rank, "wall_ns": 1} for rank in range(3)])
    store.event("resume_differs", attempt=1, rank=2, step=30, parts=["data", "rng"])
    (grid,) = proof(store, "resume_differs", ranks=(2,), first_step=30, attempt=1).data
    assert (list(grid.x), np.asarray(grid.z).tolist()) == (["data", "rng"], [[0, 0], [0, 0], [1, 1]])


@pytest.mark.parametrize(("cause", "told"), [("hot", {"layer": 1, "expert": 3}), ("dropped", {"worst_layer": 1})])
def test_the_load_of_an_expert_beside_the_others(cause: str, told: dict[str, int]) -> None:
    store = MemoryStore()
    store.add("experts", [
        {"attempt": 0, "rank": rank, "step": step, "layer": layer, "expert": expert,
         "tokens": 500 if (layer, expert) == (1, 3) else 100, "dropped": 400 if (layer, expert) == (1, 3) else 0}
        for rank in range(2) for step in (10, 20, 30) for layer in range(2) for expert in range(4)
    ])  # fmt: skip
    shown = lines(proof(store, "expert_imbalance", cause=cause, attempt=0, evidence=told))
    assert list(shown["expert 3"].values()) == pytest.approx([0.8 if cause == "dropped" else 2.5] * 3)
    assert set(shown["others, median"].values()) == {0 if cause == "dropped" else 0.5}
