from __future__ import annotations

import math
from typing import Any

import pytest

from analyzers.numerics.loss.loss_spike import loss_spikes
from analyzers.numerics.nonfinite import non_finite_values
from analyzers.numerics.replay_result import REPLAY_EVENTS, find_replay
from analyzers.run.records.event_log import EventLog
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain

INPUT = {"shape": "8x32x64", "dtype": "float32", "min": -3.0, "max": 3e38, "mean": 1e30, "nonfinite_count": 0}


def origin(module: str, *, how: str = "operation", phase: str = "forward", samples: tuple[int, ...] = ()) -> Any:
    operation = "mm" if how == "operation" else ""
    return {"module": module, "operation": operation, "how": how, "phase": phase, "samples": list(samples),
            "inputs": [INPUT]}  # fmt: skip


def add_replay(
    store: MemoryStore, *, back: bool, older: bool | None = None, origins: dict[int, Any] | None = None, step: int = 40
) -> None:
    for rank in range(4):
        for state, came in (("same", back), ("restored", older)):
            if came is not None:
                store.event(
                    "replay", rank=rank, step=step, wall_ns=1 + (state != "same"), state=state, came_back=came,
                    state_step=39 if state == "same" else 30, origin=(origins or {}).get(rank), data_rank=rank,
                    num_samples=4,
                    samples=[{"id": 100 + rank, "loss": "nan" if rank == 2 else 2.0, "file": "a.py", "byte": 7}],
                )  # fmt: skip


def found(store: MemoryStore, execution: int = 0) -> Any:
    return find_replay(EventLog.load(store, REPLAY_EVENTS), attempt=0, step=40, execution=execution)


@pytest.mark.parametrize(
    ("back", "older", "replay_verdict", "says"),
    [
        (False, None, "transient", "suspect the device of rank 2"),
        (True, True, "batch", "on the state of step 30 too, so suspect the batch"),
        (True, False, "weights", "so suspect the weights of step 39"),
        (True, None, "data_or_numerics", "data or numerics"),
    ],
)
def test_four_replay_verdicts(back: bool, older: bool | None, replay_verdict: str, says: str) -> None:
    store = MemoryStore()
    add_replay(store, back=back, older=older)
    assert found(store).replay_verdict == replay_verdict
    assert says in found(store).text((2,))


def test_the_rank_with_the_first_bad_operation_is_named_and_not_those_that_received_it() -> None:
    store = MemoryStore()
    told = {0: origin("blocks.0.mlp.down", how="module"), 1: None, 2: origin("blocks.3.mlp.up", samples=(812,)),
            3: origin("head", phase="backward")}  # fmt: skip
    add_replay(store, back=True, origins=told)
    where = found(store).origin
    assert (where.ranks, where.module, where.operation, where.samples) == ((2,), "blocks.3.mlp.up", "mm", (812,))
    assert where.inputs == ("8x32x64 float32 min -3 max 3e+38 mean 1e+30 non-finite 0",)
    assert "in blocks.3.mlp.up (mm), forward on rank 2 with sample 812" in found(store).text()


def test_samples_with_a_loss_that_is_not_finite_come_first() -> None:
    store = MemoryStore()
    add_replay(store, back=True)
    assert [(s.number, s.loss) for s in found(store).samples][:2] == [(102, None), (100, 2.0)]
    assert found(store).num_samples == 16
    assert found(store).samples[0].place == "a.py:7"


def test_each_run_of_a_step_has_its_own_replay() -> None:
    store = MemoryStore()
    add_replay(store, back=True, older=True)
    store.event("replay", rank=0, step=40, wall_ns=9, state="same", came_back=False)
    assert found(store, execution=0).replay_verdict == "batch"
    assert found(store, execution=1).replay_verdict == "batch", "one rank has a second one, three do not"
    assert find_replay(EventLog.load(store, REPLAY_EVENTS), attempt=0, step=41) is None


@pytest.mark.parametrize("damaged", [{"origin": 7, "samples": "x"}, {"origin": {}, "samples": [1, {"id": "a"}]}, {}])
def test_damaged_events_are_tolerated(damaged: dict[str, Any]) -> None:
    store = MemoryStore()
    store.event("replay", rank=0, step=40, state="same", came_back="yes", **damaged)
    assert found(store).replay_verdict == "transient"
    assert found(store).samples == ()
    assert found(store).evidence()["is_reproduced"] is False


def step_rows(step: int, loss: float, **more: Any) -> list[dict[str, Any]]:
    return [
        {"attempt": 0, "rank": rank, "step": step, "start_ns": step * 10**8, "duration_ns": 10**8, "loss": loss,
         "grad_norm": loss, "local_loss": 2.0, "committed": math.isfinite(loss), "batch_index": step - 1, **more}
        for rank in range(4)
    ]  # fmt: skip


def test_a_replay_says_whether_the_fault_came_back_and_names_its_rank() -> None:
    store = MemoryStore()
    store.add("steps", step_rows(40, math.nan))
    (before,) = plain(non_finite_values(store, Scope()))
    assert (before.ranks, before.status) == ((), "suspect")
    add_replay(store, back=True, older=True, origins={2: origin("blocks.3.mlp.up", samples=(812,))})
    (finding,) = plain(non_finite_values(store, Scope()))
    assert (finding.ranks, finding.status, finding.cause) == ((2,), "fired", "forward")
    assert "A replay reproduced it in blocks.3.mlp.up" in finding.summary
    assert finding.evidence["replay_verdict"] == "batch"
    assert finding.evidence["origin_samples"] == [812]


def data_parallel(store: MemoryStore) -> MemoryStore:
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "dp_replicate": rank} for rank in range(4)])
    return store


@pytest.mark.parametrize(
    ("replays", "status", "cause"),
    [
        ({"back": True}, "fired", "reduction"),
        ({"back": False}, "suspect", "backward"),
        ({"back": True, "origins": {1: origin("head", phase="backward")}}, "fired", "backward"),
    ],
    ids=["made by no rank", "does not come back", "made by a rank"],
)
def test_a_fault_that_returns_without_an_origin_on_any_rank_is_placed_in_the_reduction(
    replays: dict[str, Any], status: str, cause: str
) -> None:
    """Without checks of every buffer, as on GPUs, only the replay has looked at what each rank reduced."""
    store = data_parallel(MemoryStore())
    finite_loss = step_rows(40, 2.0)
    store.add("steps", [row | {"grad_norm": math.inf} for row in finite_loss])
    store.event("nonfinite", rank=0, step=40, phase="backward", parameters=["head.weight"])
    add_replay(store, **replays)
    (finding,) = plain(non_finite_values(store, Scope()))
    assert (finding.status, finding.cause) == (status, cause)


def test_a_rank_that_did_not_replay_may_have_made_it() -> None:
    store = data_parallel(MemoryStore())
    store.add("steps", [row | {"grad_norm": math.inf} for row in step_rows(40, 2.0)])
    for rank in range(3):
        store.event("replay", rank=rank, step=40, wall_ns=1, state="same", came_back=True, origin=None)
    (finding,) = plain(non_finite_values(store, Scope()))
    assert finding.status == "suspect"


def test_a_replay_names_one_rank_of_those_that_share_a_loss() -> None:
    """A sum over a tensor-parallel group hands one rank's NaN to the others, whose loss is then NaN, too."""
    store = MemoryStore()
    rows = [row | {"local_loss": math.nan if row["rank"] < 2 else 2.0} for row in step_rows(40, math.nan)]
    store.add("steps", rows)
    (before,) = plain(non_finite_values(store, Scope()))
    assert (before.ranks, before.cause) == ((0, 1), "forward")
    add_replay(store, back=True, origins={0: origin("blocks.1", how="module"), 1: origin("blocks.1.mlp.up")})
    (finding,) = plain(non_finite_values(store, Scope()))
    assert (finding.ranks, finding.cause) == ((1,), "forward")


@pytest.mark.parametrize(
    ("back", "older", "cause"), [(False, None, "transient"), (True, False, "weights"), (True, True, "batch")]
)
def test_the_replay_knows_the_cause_of_a_spike(back: bool, older: bool | None, cause: str) -> None:
    store = MemoryStore()
    for step in range(1, 60):
        store.add("steps", step_rows(step, (4.0 if step == 40 else 2.0) * (1 + 0.01 * math.sin(step))))
    add_replay(store, back=back, older=older)
    (finding,) = plain(loss_spikes(store, Scope()))
    assert (finding.cause, finding.advice) == (cause, f"loss-spike-{cause}")


def test_a_live_step_is_not_reported_before_it_has_ended() -> None:
    """What is done about it comes between its verdict and its end."""
    store = MemoryStore()
    store.add("steps", step_rows(39, 2.0))
    store.event("nonfinite", rank=0, step=40, phase="backward", parameters=["head.weight"])
    assert non_finite_values(store, Scope(now_ns=1)) == []
    assert len(plain(non_finite_values(store, Scope()))) == 1
