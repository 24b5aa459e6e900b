"""The bubble as a finding, and the stage that has too much to do: not a rank that is slow by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analyzers.pipeline.analyze import better_cut, heaviest, pipeline
from analyzers.pipeline.explain import NEXT
from analyzers.pipeline.policy import PipelinePolicy
from analyzers.scope import Scope
from analyzers.wording import percent
from store import Store
from tests.analyzers.account.test_bubble import MS, Span, gpipe
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore
from tests.support.simulator import Fault, Layout, Scenario, simulate, write

GPIPE = Scope(manifest={"config": {"parallel": {"schedule": "gpipe"}}})

STAGES, MICROBATCHES = 4, 8


def pipelines(spans_of: dict[int, list[Span]]) -> MemoryStore:
    """A store of pipelines side by side: pipeline -> spans of ranks 0 to 3 of it."""
    store = MemoryStore()
    for number, spans in spans_of.items():
        own = [{"rank": number * STAGES + pp, "pp": pp, "dp_replicate": number} for pp in range(STAGES)]
        store.add("ranks", [{"attempt": 0, "wall_ns": 1} | row for row in own])
        names = ("step", "stage", "microbatch", "kind", "start_ns", "end_ns")
        store.add(
            "spans",
            [
                {"attempt": 0, "rank": number * STAGES + rank} | dict(zip(names, rest, strict=True))
                for rank, *rest in spans
            ],
        )
    return store


def steps(count: int, *, slow: int = -1, factor: int = 1, slow_from: int = 1) -> list[Span]:
    found: list[Span] = []
    for step in range(1, count + 1):
        is_slow = slow if step >= slow_from else -1
        found += gpipe(STAGES, MICROBATCHES, slow=is_slow, factor=factor, step=step, start=step * 1000 * MS)
    return found


def test_a_balanced_pipeline_is_measured_and_not_blamed() -> None:
    (bubble,) = explained(pipeline(pipelines({0: steps(20)}), GPIPE))
    assert (bubble.kind, bubble.status) == ("bubble", "ok")
    expected = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    assert bubble.evidence["idle_ratio"] == pytest.approx(expected, abs=1e-4)
    assert bubble.evidence["idle_expected_ratio"] == pytest.approx(expected, abs=1e-4)


def test_the_next_step_states_the_gain() -> None:
    (bubble,) = pipeline(pipelines({0: steps(20)}), GPIPE)
    twice = (STAGES - 1) / (2 * MICROBATCHES + STAGES - 1)
    assert NEXT["bubble"](bubble).startswith(
        f"Use {2 * MICROBATCHES} microbatches instead of {MICROBATCHES} ({percent(twice)} idle by the schedule"
    )
    bubble, _ = pipeline(pipelines({0: steps(20, slow=2, factor=2)}), GPIPE)
    assert NEXT["bubble"](bubble) == "Move 38 % of stage 2 away (parallel.stage_costs)."
    without = replace(bubble, evidence={})
    assert NEXT["bubble"](without) == "Use more microbatches or an interleaved schedule, or balance the stages."


def test_a_heavy_stage_is_named_with_all_its_ranks() -> None:
    store = pipelines({0: steps(20, slow=2, factor=2), 1: steps(20, slow=2, factor=2)})
    bubble, heavy = explained(pipeline(store, GPIPE))
    assert bubble.evidence["idle_ratio"] > bubble.evidence["idle_expected_ratio"] + 0.1
    assert (heavy.kind, heavy.status, heavy.ranks, heavy.cause) == ("stage_imbalance", "fired", (2, 6), "imbalance")
    assert heavy.evidence["work_factor_ratio"] == 2.0
    assert heavy.evidence["pipeline_speedup_ratio"] == pytest.approx(2 / 1.25)


def test_a_slow_rank_is_no_heavy_stage() -> None:
    """It is slow on one pipeline, or from some step on."""
    one_of_two = pipelines({0: steps(20, slow=2, factor=2), 1: steps(20)})
    from_step_11 = pipelines({0: steps(30, slow=2, factor=2, slow_from=16)})
    for store in (one_of_two, from_step_11):
        assert [finding.kind for finding in explained(pipeline(store, GPIPE))] == ["bubble"]


def test_too_few_records_are_reported() -> None:
    (finding,) = explained(pipeline(pipelines({0: steps(8)}), Scope()))
    assert (finding.kind, finding.status) == ("bubble", "insufficient_data")
    assert explained(pipeline(MemoryStore(), Scope())) == []


def test_a_stage_is_named_only_if_it_is_the_heaviest_in_every_pipeline() -> None:
    policy = PipelinePolicy()
    assert heaviest([[[1.0, 1.3, 1.0], [1.0, 1.3, 1.0]]], policy) == 1
    assert heaviest([[[1.0, 1.3, 1.0], [1.3, 1.0, 1.0]]], policy) is None
    assert heaviest([[[1.0, 1.1, 1.0], [1.0, 1.1, 1.0]]], policy) is None, "how layers divide"


def test_a_stage_whose_ranks_wait_for_one_slow_rank_is_not_heavy(tmp_path: Path) -> None:
    """Rank 3 is short of a core, and the other rank of its stage waits for it in the reduction of its gradients."""
    scenario = Scenario(
        seed=1, layout=Layout(pp=2, dp_replicate=2, microbatches=4, layers=1), steps=40,
        fault=Fault(kind="core_taken", rank=3, factor=1.6), backend="gloo",
    )  # fmt: skip
    run = write(simulate(scenario), tmp_path / "run")
    with Store.open(run) as store:
        (bubble,) = explained(pipeline(store, Scope()))
    assert bubble.kind == "bubble"
    assert bubble.evidence["heaviest_stage"] is None
    assert "has the most work" not in bubble.summary


def on_devices(work_ms: dict[int, float], *, ranks_of_stage: int = 2, num_steps: int = 30) -> MemoryStore:
    """Steps of 100 ms on GPUs in which a rank receives for as long as it has no work."""
    store = MemoryStore()
    for pp, work in work_ms.items():
        for replica in range(ranks_of_stage):
            rank = pp * ranks_of_stage + replica
            store.add("ranks", [{"attempt": 0, "wall_ns": 1, "rank": rank, "pp": pp, "dp_replicate": replica,
                                 "device": "cuda:0"}])  # fmt: skip
            store.add("nccl_groups", [{"attempt": 0, "rank": rank, "communicator": 0, "process_group": "pp:0"}])
            for step in range(1, num_steps + 1):
                begin = step * 100 * MS
                store.add("steps", [{"attempt": 0, "rank": rank, "step": step, "start_ns": begin,
                                     "duration_ns": 100 * MS}])  # fmt: skip
                store.add("spans", [{"attempt": 0, "rank": rank, "step": step, "stage": pp, "microbatch": 0,
                                     "kind": "forward", "start_ns": begin, "end_ns": begin + MS}])  # fmt: skip
                store.add("collectives", [{
                    "attempt": 0, "rank": rank, "step": step, "seq": step, "op": "recv", "process_group": "pp:0",
                    "peer": (rank + ranks_of_stage) % (len(work_ms) * ranks_of_stage), "issue_ns": begin,
                    "end_ns": begin + int((100 - work) * MS), "wait_ns": None,
                }])  # fmt: skip
    return store


def test_on_devices_a_heavy_stage_shows_in_what_its_ranks_do_not_wait() -> None:
    """Spans are those of hosts that run ahead: no bubble, but the durations of calls tell each rank's own work."""
    bubble, heavy = explained(pipeline(on_devices({0: 60, 1: 90, 2: 60, 3: 62}), Scope()))
    assert (bubble.kind, bubble.status) == ("bubble", "insufficient_data")
    assert (heavy.kind, heavy.status, heavy.ranks) == ("stage_imbalance", "fired", (2, 3))
    assert heavy.evidence["work_factor_ratio"] == pytest.approx(1.5)
    assert "at least 1.50x the work" in heavy.summary


def test_on_devices_even_stages_are_not_blamed() -> None:
    (bubble,) = explained(pipeline(on_devices({0: 60, 1: 63, 2: 60, 3: 62}), Scope()))
    assert bubble.kind == "bubble"


def crowded(cpu_ms: dict[int, float], *, num_steps: int = 30) -> MemoryStore:
    """Stage 3's spans take three times as long as those of the others; the ranks wait for cores in all of them."""
    store = pipelines({0: steps(num_steps, slow=3, factor=3)})
    for rank, own in cpu_ms.items():
        store.add("ranks", [{"attempt": 0, "wall_ns": 2, "rank": rank, "pp": rank, "device": "cpu"}])
        store.add("steps", [
            {"attempt": 0, "rank": rank, "step": step, "start_ns": step * 1000 * MS, "duration_ns": 900 * MS,
             "cpu_ns": int(own * MS), "run_delay_ns": 400 * MS} for step in range(1, num_steps + 1)
        ])  # fmt: skip
    return store


def test_on_a_crowded_machine_stages_are_compared_by_cpu_time() -> None:
    (bubble,) = explained(pipeline(crowded({0: 53.1, 1: 52.5, 2: 52.1, 3: 55.7}), GPIPE))
    assert (bubble.kind, bubble.evidence["heaviest_stage"]) == ("bubble", None)
    assert "Ranks wait for cores" in bubble.summary
    _, heavy = explained(pipeline(crowded({0: 50, 1: 52, 2: 75, 3: 50}), GPIPE))
    assert (heavy.ranks, heavy.evidence["work_factor_ratio"]) == ((2,), 1.5)
    assert "at least 1.50x the work of the others by CPU time" in heavy.summary


@pytest.mark.parametrize(
    ("slow", "layers", "status", "balance", "do"),
    [
        (3, 16, "fired", "Moving 38 % of its layers away would balance it.", "fewer layers"),
        (3, 4, "advice", "No other split of the layers is better: this stage also has the head", "fewer stages"),
        (0, 4, "advice", "No other split of the layers is better: this stage also has the embedding.", "fewer stages"),
        (2, 4, "fired", "No other split of the layers is better, so its device may be slow.", "Swap the devices"),
        (3, None, "fired", "Moving 38 % of its work away would balance it.", "fewer layers"),
    ],
)
def test_only_layers_that_can_be_moved_are_advised(
    slow: int, layers: int | None, status: str, balance: str, do: str
) -> None:
    """The demo on four stages: each has a layer, and the last one the head and the loss as well."""
    model = {} if layers is None else {"num_layers": layers}
    scope = Scope(manifest={"config": {"model": model, "parallel": {"schedule": "gpipe"}}})
    _, heavy = explained(pipeline(pipelines({0: steps(20, slow=slow, factor=2)}), scope))
    assert heavy.status == status
    assert balance in heavy.summary
    assert do in NEXT["stage_imbalance"](heavy)


def test_a_cut_is_better_if_the_other_stage_stays_below() -> None:
    assert better_cut(1.6, 2, 1)
    assert not better_cut(1.4, 2, 1), "with one layer more the other has 1.5 times its work"
    assert not better_cut(3.0, 1, 1), "each stage keeps a layer"
    assert not better_cut(3.0, 2, 2)
