from __future__ import annotations

import math
from dataclasses import replace

import pytest

from analyzers.deaths.recovery_response import done_about
from analyzers.finding import Finding
from analyzers.numerics.explain import NEXT, WHY
from analyzers.numerics.nonfinite import non_finite_values
from analyzers.numerics.nonfinite_origin import Flag, RankStep, StepEvidence, locate
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.sentences import plain

MODEL = ["embed.weight", "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "blocks.10.mlp.up.weight", "head.weight"]
STEP_NS = 50_000_000


def flag(rank: int, seq: int, bad: bool, *, group: str = "dp[0,1,2,3]", since_ns: int | None = None) -> Flag:
    since_ns = seq * 1000 if since_ns is None else since_ns
    return Flag(rank=rank, group=group, seq=seq, op="all_reduce", since_begin_ns=since_ns, nonfinite=bad)


def rows(*bad_losses: int, world_size: int = 4) -> list[RankStep]:
    return [RankStep(rank=r, local_loss=math.nan if r in bad_losses else 2.0) for r in range(world_size)]


def test_the_earliest_flag_names_the_rank_and_the_rest_is_fallout() -> None:
    flags = [flag(r, 5, r == 2) for r in range(4)] + [flag(r, 6, True) for r in range(4)]
    where = locate(
        StepEvidence(rows=rows(), flags=flags, parameters=[(r, name, 1) for r in range(4) for name in MODEL])
    )
    assert (where.ranks, where.phase, where.seq, where.parameter) == ((2,), "backward", 5, "head.weight")


def test_flags_are_ordered_within_the_step_and_not_within_their_group() -> None:
    """HSDP: rank 1's shard group sees it first; the replica groups see the sum of it."""
    flags = [
        flag(0, 90, True, group="dp_replicate[0,2]", since_ns=500),
        flag(2, 90, False, group="dp_replicate[0,2]", since_ns=510),
        flag(0, 7, False, group="dp_shard[0,1]", since_ns=100),
        flag(1, 7, True, group="dp_shard[0,1]", since_ns=120),
    ]
    assert locate(StepEvidence(rows=rows(), flags=flags)).ranks == (1,)


def test_a_rank_that_waited_long_before_its_first_collective_is_still_the_first() -> None:
    """Rank 2 began its step before the others, and was late: by its own clock its first call is after their second."""
    flags = [flag(rank, 5, False, since_ns=100) for rank in (0, 1, 3)] + [flag(2, 5, True, since_ns=900)]
    flags += [flag(rank, 6, True, since_ns=200) for rank in (0, 1, 3)] + [flag(2, 6, True, since_ns=950)]
    where = locate(StepEvidence(rows=rows(), flags=flags))
    assert (where.ranks, where.seq) == ((2,), 5)


def test_a_gradient_that_was_bad_before_its_reduction_names_its_rank() -> None:
    """As on devices, where inputs of collectives are not looked at."""
    own = [(0, False), (1, True), (2, False), (3, False)]
    where = locate(StepEvidence(rows=rows(), own_gradients=own, data_parallel=True))
    assert (where.ranks, where.phase) == ((1,), "backward")
    finite = [(rank, False) for rank in range(4)]
    where = locate(StepEvidence(rows=rows(), own_gradients=finite, data_parallel=True))
    assert (where.ranks, where.phase) == ((), "reduction")
    where = locate(StepEvidence(rows=rows(), own_gradients=finite[:3], data_parallel=True))
    assert (where.ranks, where.how) == ((), "nothing"), "of rank 3 nothing is known"
    where = locate(StepEvidence(rows=rows(2), own_gradients=own, data_parallel=True))
    assert (where.ranks, where.phase) == ((2,), "forward"), "its gradients follow from its loss"


def test_a_bad_local_loss_is_placed_in_forward() -> None:
    where = locate(StepEvidence(rows=rows(3), flags=[flag(r, 1, r == 3) for r in range(4)]))
    assert (where.ranks, where.phase, where.parameter) == ((3,), "forward", "")
    assert locate(StepEvidence(rows=rows(3))).ranks == (3,)


def test_a_bad_batch_names_the_ranks_of_all_tensor_parallel_groups() -> None:
    """Each group of one sample sees its own NaN in the forward pass; which of them was sooner says nothing."""

    def found(*bad: int) -> tuple[int, ...]:
        flags = [
            replace(flag(rank, seq, rank in bad, group=group, since_ns=100 * seq + 10 * rank), phase="forward")
            for group, members in (("tp:0-1", (0, 1)), ("tp:2-3", (2, 3)))
            for rank in members
            for seq in (1, 2)
        ]
        flags += [replace(flag(rank, 3, rank in bad, since_ns=900), phase="backward") for rank in range(4)]
        where = locate(StepEvidence(rows=rows(*bad), flags=flags))
        assert where.phase == "forward"
        return where.ranks

    assert found(0, 1, 2, 3) == (0, 1, 2, 3)
    assert found(2, 3) == (2, 3)


def test_a_bad_result_from_finite_inputs_is_placed_in_the_reduction() -> None:
    where = locate(StepEvidence(rows=rows(), flags=[flag(r, 1, False) for r in range(4)]))
    assert (where.ranks, where.phase) == ((), "reduction")


@pytest.mark.parametrize("counted", [0, None])
def test_a_norm_over_finite_gradients_is_no_overflow_of_their_reduction(counted: int | None) -> None:
    steps = [RankStep(rank=r, local_loss=2e30, grad_norm=math.inf, nonfinite_count=counted) for r in range(4)]
    where = locate(StepEvidence(rows=steps, flags=[flag(r, 1, False) for r in range(4)], data_parallel=True))
    assert (where.ranks, where.phase) == ((), "reduction" if counted is None else "unknown")


def test_a_norm_that_overflows_is_named_with_what_to_do() -> None:
    store = MemoryStore()
    for rank in range(2):
        for step in range(1, 21):
            bad = step in (12, 13)
            store.add("steps", [{
                "attempt": 0, "rank": rank, "step": step, "start_ns": step * STEP_NS, "duration_ns": STEP_NS - 1000,
                "loss": 2.0, "local_loss": 2.0, "grad_norm": math.inf if bad else 1.0, "committed": True,
                "nonfinite_count": 0 if bad else None,
            }])  # fmt: skip
    finding = only(non_finite(store))
    assert finding.summary.startswith(
        "The gradient norm overflowed to Inf from step 12 to 13, over gradients that were all finite."
    )
    assert WHY["non_finite"](finding) == "Every rank counted its gradients' NaN and Inf elements: there were none."
    assert NEXT["non_finite"](finding).startswith("Lower the loss scale or the learning rate")


def test_a_sum_that_overflows_is_the_reduction_though_the_norm_that_follows_is_flagged() -> None:
    """FSDP: every gradient goes finite into its reduce-scatter, and rank 1 gets the shard with the Inf."""

    def found(*, data_parallel: bool) -> tuple[tuple[int, ...], str]:
        flags = [replace(flag(rank, 1, False), phase="backward") for rank in range(4)]
        flags += [replace(flag(rank, 2, rank == 1), phase="optimizer") for rank in range(4)]
        where = locate(StepEvidence(rows=rows(), flags=flags, data_parallel=data_parallel))
        return where.ranks, where.phase

    assert found(data_parallel=True) == ((), "reduction")
    assert found(data_parallel=False) == ((1,), "backward"), "a tensor-parallel rank's own gradient is not reduced"


def test_without_evidence_nobody_is_named() -> None:
    where = locate(StepEvidence(rows=[RankStep(rank=r) for r in range(4)], reported_parameters=["a", "b"]))
    assert (where.ranks, where.phase, where.parameter) == ((), "backward", "b")


def test_one_rank_needs_no_flags() -> None:
    where = locate(StepEvidence(rows=[RankStep(rank=0, local_loss=2.0)], parameters=[(0, "a", 0), (0, "b", 3)]))
    assert (where.ranks, where.phase, where.parameter) == ((0,), "backward", "b")


def test_the_parameter_nearest_the_loss_is_last_in_model_order() -> None:
    parameters = [(r, name, int(name in MODEL[:4] and r == 1)) for r in range(4) for name in MODEL]
    where = locate(StepEvidence(rows=rows(), flags=[flag(2, 1, True)], parameters=parameters))
    assert where.parameter == "blocks.10.mlp.up.weight"
    assert where.others == tuple(MODEL[:4])


def run_with_nan(bad_step: int = 12, culprit: int = 2, world_size: int = 4) -> MemoryStore:
    """A run whose guard refuses the bad step, restores step 10 and skips the batch."""
    store = MemoryStore()
    order = [*range(1, bad_step + 1), *range(11, 21)]
    for rank in range(world_size):
        for i, step in enumerate(order):
            bad = i == bad_step - 1
            row = {"attempt": 0, "rank": rank, "step": step, "start_ns": rank * 10**12 + i * STEP_NS}
            row |= {"duration_ns": STEP_NS - 1000, "loss": 2.0, "local_loss": 2.0 + rank, "batch_index": i}
            store.add("steps", [row | {"grad_norm": math.nan if bad else 1.0, "committed": not bad}])
            for seq in (2 * i, 2 * i + 1):
                store.add("collectives", [{
                    "attempt": 0, "rank": rank, "step": step, "seq": seq, "process_group": "dp[0,1,2,3]",
                    "op": "all_reduce", "issue_ns": row["start_ns"] + 1_000_000 * (1 + seq % 2),
                    "nonfinite": bad and (rank == culprit or seq % 2 == 1),
                }])  # fmt: skip
        for name in MODEL:
            store.add("gradients", [{"attempt": 0, "rank": rank, "step": bad_step, "parameter": name,
                                     "nonfinite_count": int(name == MODEL[2])}])  # fmt: skip
    store.event("rollback", rank=0, step=bad_step, from_step=bad_step, to_step=10, tier="memory", reason="non_finite",
                skipped_batches=[bad_step - 1], duration_s=0.2)  # fmt: skip
    return store


def non_finite(store: MemoryStore) -> list[Finding]:
    return plain(non_finite_values(store, Scope()))


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_step_that_was_refused_without_a_rollback_is_an_action_of_the_run() -> None:
    store = run_with_nan()
    assert done_about(store, only(non_finite(store))) == [
        "Step 12: Rolled back to step 10 from memory in 0.2 s and skipped batch 11."
    ]
    store.connection.execute("DELETE FROM events")
    assert done_about(store, only(non_finite(store))) == ["Refused the step."]


def test_a_refused_step_is_one_finding_and_its_replay_none() -> None:
    finding = only(non_finite(run_with_nan()))
    assert (finding.kind, finding.status, finding.ranks, finding.cause) == ("non_finite", "fired", (2,), "backward")
    assert (finding.first_step, finding.last_step) == (12, 12)
    assert finding.summary == (
        f"Rank 2 produced a NaN or Inf gradient at step 12 ({MODEL[2]}). "
        "Rolled back to step 10 from memory in 0.2 s and skipped batch 11."
    )
    assert finding.evidence["update_skipped"] is True
    assert finding.evidence["seq"] == 22


@pytest.mark.parametrize("bad_from", [1, 30])
def test_a_poisoned_run_is_one_finding(bad_from: int) -> None:
    store = MemoryStore()
    for rank in range(4):
        for step in range(1, 61):
            loss = math.nan if step >= bad_from else 2.0
            store.add("steps", [{"attempt": 0, "rank": rank, "step": step, "start_ns": step, "duration_ns": 1,
                                 "loss": loss, "local_loss": loss, "committed": True}])  # fmt: skip
    finding = only(non_finite(store))
    assert (finding.first_step, finding.last_step, finding.ranks) == (bad_from, 60, (0, 1, 2, 3))
    assert "The forward pass of all ranks" in finding.summary
    assert "No action was taken" in finding.summary


def test_a_step_after_which_the_loss_is_finite_may_have_been_dropped_by_the_loop() -> None:
    """As Megatron's optimizer drops it: the passes are recorded with those of the next update, which is made."""
    store = MemoryStore()
    for rank in range(2):
        for step in range(1, 41):
            loss = math.nan if (rank, step) == (1, 20) else 2.0
            store.add("steps", [{"attempt": 0, "rank": rank, "step": step, "start_ns": step, "duration_ns": 1,
                                 "loss": loss, "local_loss": loss, "committed": True}])  # fmt: skip
    finding = only(non_finite(store))
    assert finding.summary == "The forward pass of rank 1 gave a NaN or Inf loss at step 20. No response is recorded."
    assert (finding.severity, finding.evidence["update_skipped"]) == ("critical", None)


def test_a_ruined_update_is_traced_to_the_step_before() -> None:
    store = MemoryStore()
    for rank in range(4):
        for step in range(1, 41):
            loss = math.nan if step >= 20 else 2.0
            store.add("steps", [{"attempt": 0, "rank": rank, "step": step, "start_ns": step * STEP_NS,
                                 "duration_ns": STEP_NS - 1, "loss": loss, "local_loss": loss}])  # fmt: skip
            store.add("collectives", [{"attempt": 0, "rank": rank, "step": step, "seq": step, "process_group": "dp",
                                       "op": "reduce_scatter", "issue_ns": step * STEP_NS + 100,
                                       "nonfinite": step >= 20 or (step == 19 and rank == 1)}])  # fmt: skip
    finding = only(non_finite(store))
    assert (finding.ranks, finding.first_step, finding.cause) == ((1,), 19, "backward")


@pytest.mark.parametrize("clips", [True, False])
def test_a_bad_gradient_at_the_first_layer_names_its_rank(clips: bool) -> None:
    """On devices inputs of collectives are not looked at. Without a norm the step before the bad losses tells."""
    store = MemoryStore()
    for rank in range(4):
        for step in range(1, 41):
            loss = math.nan if step >= 20 else 2.0
            norm = {"grad_norm": math.nan if step >= 19 else 1.0} if clips else {}
            store.add("steps", [{"attempt": 0, "rank": rank, "step": step, "start_ns": step * STEP_NS,
                                 "duration_ns": STEP_NS - 1, "loss": loss, "local_loss": loss, **norm}])  # fmt: skip
            is_bad = step >= 20 or (step == 19 and rank == 1)
            store.add("scalars", [{"attempt": 0, "rank": rank, "step": step, "name": "input_gradient_norm",
                                   "value": math.nan if is_bad else 0.1}])  # fmt: skip
    finding = only(non_finite(store))
    assert (finding.ranks, finding.first_step, finding.cause) == ((1,), 19, "backward")
    assert finding.status == "fired"


def test_clean_runs_and_flags_without_consequence_give_no_finding() -> None:
    store = MemoryStore()
    for step in range(1, 30):
        store.add("steps", [{"attempt": 0, "rank": 0, "step": step, "start_ns": step, "duration_ns": 1, "loss": 2.0}])
    store.add("collectives", [{"attempt": 0, "rank": 0, "step": 7, "seq": 1, "process_group": "tp", "op": "all_reduce",
                               "issue_ns": 7, "nonfinite": True}])  # fmt: skip
    assert non_finite(store) == []


def test_missing_tables_are_reported() -> None:
    store = run_with_nan()
    store.drop("collectives")
    finding = only(non_finite(store))
    assert (finding.status, finding.ranks) == ("suspect", ())
    store.drop("gradients")
    assert only(non_finite(store)).status == "suspect"
    store.drop("events")
    assert only(non_finite(store)).status == "suspect"
    store.drop("steps")
    assert only(non_finite(store)).status == "insufficient_data"


@pytest.mark.parametrize("bad_input", [False, True])
def test_a_shard_that_overflows_in_its_reduction_names_no_rank(bad_input: bool) -> None:
    """HSDP: what comes out of the reduce-scatter is seen by the reduction over replicas."""
    shard = [
        replace(
            flag(rank, 7, bad_input and rank == 1, group=group, since_ns=100), op="reduce_scatter", phase="backward"
        )
        for group, members in (("dp_shard[0,1]", (0, 1)), ("dp_shard[2,3]", (2, 3)))
        for rank in members
    ]
    replicas = [
        replace(flag(rank, 90, True, group="dp_replicate[0,2]", since_ns=200), phase="backward") for rank in (0, 2)
    ]
    where = locate(StepEvidence(rows=rows(), flags=[*shard, *replicas], data_parallel=True))
    assert (where.phase, where.ranks) == (("backward", (1,)) if bad_input else ("reduction", ()))


def test_a_flag_in_the_forward_pass_is_nearer_than_the_losses() -> None:
    """Tensor parallel: both ranks of the group have the bad loss, and one of them put the bad value in."""
    flags = [replace(flag(rank, 5, rank == 1, group="tp[0,1]"), phase="forward") for rank in (0, 1)]
    where = locate(StepEvidence(rows=rows(0, 1), flags=flags))
    assert (where.phase, where.ranks) == ("forward", (1,))


@pytest.mark.parametrize("bad", [(1,), (0, 2), (0, 1, 2, 3)])
def test_a_nan_that_the_loss_function_gathered_names_the_rank_that_gave_it(bad: tuple[int, ...]) -> None:
    """Contrastive losses are computed from the features of all ranks, so all are bad."""
    gathered = [replace(flag(rank, 1, rank in bad), op="all_gather") for rank in range(4)]
    reduced = [replace(flag(rank, 2, True), phase="backward") for rank in range(4)]
    where = locate(StepEvidence(rows=rows(0, 1, 2, 3), flags=[*gathered, *reduced], data_parallel=True))
    assert (where.phase, where.ranks) == ("forward", bad)


def test_finite_features_say_nothing_of_the_reduction() -> None:
    gathered = [replace(flag(rank, 1, False), op="all_gather", phase="backward") for rank in range(4)]
    assert locate(StepEvidence(rows=rows(), flags=gathered)).phase == "unknown"
    reduced = [replace(flag(rank, 2, True), phase="optimizer") for rank in range(4)]
    where = locate(StepEvidence(rows=rows(), flags=[*gathered, *reduced], data_parallel=True))
    assert where.phase == "backward"


def of_two_by_two(*bad_losses: int, num_bad_gradients: int = 0) -> Finding:
    """The finding of a bad step of four ranks, dp_shard 2 x tp 2, whose calls were recorded on devices."""
    store = MemoryStore()
    same = {"attempt": 0, "step": 7, "start_ns": STEP_NS, "duration_ns": STEP_NS}
    for rank, row in enumerate(rows(*bad_losses)):
        store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 0, "dp_shard": rank // 2, "tp": rank % 2, "pp": 0}])
        store.add("steps", [same | {"rank": rank, "local_loss": row.local_loss, "nonfinite_count": num_bad_gradients}])
    store.add("gradients", [{"attempt": 0, "step": 7, "rank": 0, "parameter": "head.weight",
                             "nonfinite_count": num_bad_gradients}])  # fmt: skip
    (finding,) = plain(non_finite_values(store, Scope()))
    return finding


def test_a_bad_sum_of_a_tensor_parallel_group_came_from_within_it() -> None:
    finding = of_two_by_two(2, 3)
    assert (finding.status, finding.ranks, finding.cause) == ("fired", (2, 3), "forward")
    assert finding.evidence["named_by"] == "tensor_parallel_group"
    assert "of ranks 2 and 3 gave a NaN or Inf loss at step 7, made by one of them or in their" in finding.summary


def test_bad_gradients_in_several_groups_are_named_by_the_local_loss() -> None:
    assert of_two_by_two(1, 2).evidence["named_by"] == "local_loss"


def test_without_input_checks_the_reduction_is_a_suspect_too() -> None:
    finding = of_two_by_two(num_bad_gradients=3)
    assert (finding.status, finding.ranks) == ("suspect", ())
    assert "unidentified rank or the reduction" in finding.summary


@pytest.mark.parametrize(("num_ranks", "num_broke"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("has_flags", [True, False])
def test_a_loss_after_weights_that_broke_within_the_step_is_a_consequence(
    num_ranks: int, num_broke: int, has_flags: bool
) -> None:
    """Sharpness-aware minimization: a gradient of the first pass was NaN. A rank may hold a shard of the weights."""
    store = MemoryStore()
    for rank in range(num_ranks):
        row = {"attempt": 0, "step": 7, "rank": rank}
        store.add(
            "steps", [row | {"start_ns": 0, "duration_ns": STEP_NS, "local_loss": math.nan, "nonfinite_count": 9}]
        )
        largest = math.nan if rank < num_broke else 3.0
        series = {"loss_of_first_pass": 2.0, "largest_weight_of_last_pass": largest}
        store.add("scalars", [row | {"name": name, "value": value} for name, value in series.items()])
        store.add("gradients", [row | {"parameter": "head.weight", "nonfinite_count": 9}])
        flags = [(1, rank == 1), (2, True)] if has_flags and num_ranks > 1 else []
        store.add("collectives", [row | {"seq": seq, "process_group": "dp", "op": "all_reduce", "issue_ns": seq,
                                         "nonfinite": bad} for seq, bad in flags])  # fmt: skip
    finding = only(non_finite(store))
    expected = (0,) if num_ranks == 1 else (1,) if has_flags else ()
    assert (finding.ranks, finding.cause, finding.first_step) == (expected, "backward", 7)
    assert finding.evidence["parameter"] == ""
    if num_ranks == 1:
        assert "weights became NaN or Inf between two passes of step 7" in finding.summary
        assert "first loss was finite" in WHY["non_finite"](finding)


def test_a_first_loss_that_was_bad_already_is_the_origin() -> None:
    store = MemoryStore()
    row = {"attempt": 0, "step": 7, "rank": 0}
    store.add("steps", [row | {"start_ns": 0, "duration_ns": STEP_NS, "local_loss": math.nan}])
    series = ("loss_of_first_pass", "largest_weight_of_last_pass")
    store.add("scalars", [row | {"name": name, "value": math.nan} for name in series])
    assert only(non_finite(store)).cause == "forward"


@pytest.mark.parametrize("has_flags", [True, False])
def test_a_first_loss_that_was_bad_on_one_rank_is_the_origin_of_all(has_flags: bool) -> None:
    """A discriminator's loss was NaN on one rank: after its update the generator's loss is NaN on every rank."""
    store = MemoryStore()
    for rank in range(2):
        row = {"attempt": 0, "step": 7, "rank": rank}
        store.add("steps", [row | {"start_ns": 0, "duration_ns": STEP_NS, "local_loss": math.nan}])
        store.add("scalars", [row | {"name": "loss_of_first_pass", "value": math.nan if rank == 1 else 2.0}])
        flags = [(1, rank == 1), (2, True)] if has_flags else []
        store.add("collectives", [row | {"seq": seq, "process_group": "dp", "op": "all_reduce", "issue_ns": seq,
                                         "nonfinite": bad} for seq, bad in flags])  # fmt: skip
    finding = only(non_finite(store))
    assert (finding.ranks, finding.cause, finding.first_step) == ((1,), "forward", 7)
