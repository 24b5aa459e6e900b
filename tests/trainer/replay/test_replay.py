"""A refused step is replayed: whether the fault comes back, where it begins, and that nothing else is changed by it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.depth import usually
from tests.processes import run_ranks
from tests.trainer.layouts import tiny
from tests.trainer.training_runs import RunResult, assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint.state import rng_state
from trainer.layout.resolve import resolve
from trainer.rank.loop import Session
from trainer.replay.origin import Origin, OriginWatch
from trainer.replay.samples import describe, differing_rows
from trainer.replay.triage import replay
from trainer.training.build import Training, build


def events(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    found, _, _ = read_events(RunDir(folder).rank_dir(0, rank) / "events.jsonl")
    return [event for event in found if event["kind"] == kind]


# ---- where it begins ----


def training_of(**sections: dict[str, Any]) -> Training:
    config = tiny(**sections)
    return build(config, resolve(config, 1), torch.device("cpu"))


def origin_of(training: Training) -> Origin | None:
    return replay(training, training.batch(0), None, 1).origin


def spoil_weights(training: Training) -> None:
    """So large that the product with an ordinary input is beyond float32."""
    with torch.no_grad():
        training.modules[0].blocks["1"].mlp.up.weight.fill_(3e38)  # type: ignore[union-attr, operator]


def root_of_zero(training: Training) -> None:
    """Finite forward, and a derivative that is not: 0 times the root's slope at 0."""
    gate = training.modules[0].blocks["1"].mlp.gate  # type: ignore[union-attr]
    gate.register_forward_hook(lambda _m, _i, out: out + 1e-3 * (out * 0).abs().sqrt())  # type: ignore[operator, union-attr]


VARIANTS = [
    {},
    {"train": {"activation_checkpointing": "full"}},
    {"train": {"activation_checkpointing": "selective", "micro_batch_size": 2}},
]


@pytest.mark.parametrize("sections", VARIANTS, ids=["plain", "recomputed", "selective, microbatches"])
def test_first_operation_of_an_overflow_and_of_a_bad_derivative(sections: dict[str, Any]) -> None:
    training = training_of(**sections)
    spoil_weights(training)
    found = origin_of(training)
    assert found is not None
    assert (found.module, found.operation, found.phase, found.how) == ("blocks.1.mlp.up", "mm", "forward", "operation")
    assert max(described["max"] for described in found.inputs) == pytest.approx(3e38)
    assert all(described["nonfinite_count"] == 0 for described in found.inputs)

    training = training_of(**sections)
    root_of_zero(training)
    found = origin_of(training)
    assert found is not None
    assert (found.module, found.phase, found.how) == ("blocks.1.mlp.gate", "backward", "operation")


def test_a_masked_infinity_is_innocent_and_a_bad_parameter_is_named() -> None:
    training = training_of(data={"document_mask": True, "separator": 10})
    assert origin_of(training) is None
    attention = training.modules[0].blocks["0"].attention  # type: ignore[union-attr]
    masked = torch.full((), -math.inf)

    def through_a_mask(_m: Any, _i: Any, out: torch.Tensor) -> torch.Tensor:
        return out + torch.softmax(torch.where(out > 0, out, masked * torch.ones(())), -1).nan_to_num(0.0)

    attention.register_forward_hook(through_a_mask)  # type: ignore[union-attr]
    assert origin_of(training) is None
    with torch.no_grad():
        training.modules[0].blocks["1"].mlp.up.weight[3, 3] = math.nan  # type: ignore[union-attr, index]
    found = origin_of(training)
    assert found is not None
    assert (found.module, found.how) == ("blocks.1.mlp.up.weight", "parameter")


def test_the_sample_that_overflows_is_named() -> None:
    training = training_of()
    batch = training.batch(0)
    norm = training.modules[0].blocks["1"].mlp_norm

    def one_row(_m: Any, _i: Any, out: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(out.shape[0], 1, 1)
        scale[5] = 3e38
        return out * scale

    norm.register_forward_hook(one_row)  # type: ignore[union-attr]
    from trainer.replay.triage import findings

    found = findings(training, batch, replay(training, batch, None, 1))
    assert found["origin"]["samples"] == [batch.sample_ids[5]]
    worst = found["samples"][0]
    assert (worst["id"], worst["row"]) == (batch.sample_ids[5], 5)
    assert not math.isfinite(worst["loss"])
    assert worst["text"]


def test_losses_of_samples_add_up_and_their_text_is_what_the_file_says() -> None:
    training = training_of(train={"micro_batch_size": 2})
    batch = training.batch(3)
    again = replay(training, batch, None, 1)
    assert sorted(again.sample_losses) == list(range(8))
    assert sum(again.sample_losses.values()) / 8 == pytest.approx(again.loss, rel=1e-6)
    worst, *others = describe(training, batch, again.sample_losses, most=8)
    assert [other["loss"] for other in others] == sorted((o["loss"] for o in others), reverse=True)
    row = batch.inputs[worst["row"]]
    assert worst["text"].encode("utf-8", "replace")[:8] == bytes(row[:8].tolist())
    start = training.stream.corpus.starts[training.stream.corpus.names.index(worst["file"])] + worst["byte"]
    assert row.tolist() == training.stream.corpus.tokens[start : start + 32].tolist()
    assert differing_rows(training, batch) == []
    batch.inputs[2, 7] += 1
    assert differing_rows(training, batch) == [batch.sample_ids[2]]


def test_a_watched_pass_computes_the_same_bits_and_leaves_nothing_behind() -> None:
    training = training_of(model={"dropout": 0.1}, train={"micro_batch_size": 4})
    batch = training.batch(0)
    loss = training.forward_backward(batch)
    gradients = [parameter.grad.clone() for _, parameter in training.named_parameters() if parameter.grad is not None]
    training.discard()
    hooks = _hooks(training)
    with OriginWatch(training.modules):
        assert training.forward_backward(batch).equal(loss)
    for expected, (_, parameter) in zip(gradients, training.named_parameters(), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.equal(expected)
    training.discard()
    before, parameters = rng_state(training.device), [p.clone() for _, p in training.named_parameters()]
    replay(training, batch, None, 1)
    assert all(value.equal(before[name]) for name, value in rng_state(training.device).items())
    assert all(p.equal(q) and q.grad is None for p, (_, q) in zip(parameters, training.named_parameters(), strict=True))
    assert _hooks(training) == hooks


def _hooks(training: Training) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for part in training.modules
        for module in part.modules()
    )


# ---- in a run ----

STEPS = 12
FAULTS = ("nan_grad@step=6,rank=1", "failing_batch@batch=9")
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"dp_replicate": 2, "dp_shard": 1}},
    "fsdp": {"parallel": {"dp_shard": 2}, "train": {"activation_checkpointing": "full"}},
    "tp": {"parallel": {"dp_shard": 1, "tp": 2}},
    "pp": {"parallel": {"dp_shard": 1, "pp": 2}},
}
LAYOUTS = usually(LAYOUTS, later=["ddp", "tp"])


def _with_and_without(rank: int, world_size: int, folder: Path) -> dict[str, list[RunResult]]:
    found = {}
    for name, sections in LAYOUTS.items():
        # The rank with the loss, in a pipeline, is the last: both have their part of the fault.
        sections = {**sections, "model": {"dropout": 0.1}, "data": {"path": [__file__]}}
        config = with_steps(small(**sections), STEPS)
        without = with_steps(small(**sections, recovery={"max_replays": 0}), STEPS)
        runs = [
            run_loop(chosen, folder / name / kind, rank=rank, world_size=world_size, faults=faults)
            for kind, chosen, faults in (("with", config, FAULTS), ("without", without, FAULTS[1:]))
        ]
        assert_same_bits(*runs)
        found[name] = runs
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    for result in run_ranks(_with_and_without, world_size=2, args=(folder,), deadline_s=120):
        for name, (on, off) in result.items():
            assert on.skipped == off.skipped == [9], name
            assert set(on.tried) == set(off.tried), name
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_says_what_comes_back_and_the_run_is_the_same_to_the_last_bit(runs: Path, layout: str) -> None:
    for rank in range(2):
        assert not events(runs / layout / "without", "replay", rank)
        nan, failing, older = events(runs / layout / "with", "replay", rank)
        assert (nan["step"], nan["state"], nan["came_back"], nan["origin"]) == (6, "same", False, None)
        assert math.isfinite(nan["loss"])
        assert (failing["state"], failing["came_back"]) == ("same", True)
        assert (older["state"], older["came_back"]) == ("restored", True)
        assert older["state_step"] < failing["state_step"]
        if failing["samples"]:  # not on a pipeline's first rank
            assert failing["origin"]["module"] == "head"
            named = failing["origin"]["samples"]  # of the first microbatch
            assert named
            assert set(named) <= {sample["id"] for sample in failing["samples"]}
    assert any(events(runs / layout / "with", "replay", rank)[1]["samples"] for rank in range(2))


def test_a_spike_comes_back_to_the_last_bit_with_the_loss_of_each_sample(tmp_path: Path) -> None:
    run_loop(with_steps(small(), 26), tmp_path, rank=0, world_size=1, faults=["bad_batch@batch=24"])
    same, older = events(tmp_path, "replay")
    assert (same["came_back"], older["came_back"]) == (True, True)
    assert same["loss"] == same["loss_refused"], "the same computation"
    assert all(sample["loss"] > 1.2 * same["loss_level"] for sample in same["samples"])
    # What the drill put into the batch is not what the data set holds.
    assert same["changed_samples"] == [sample["id"] for sample in sorted(same["samples"], key=lambda s: s["row"])]


def test_weights_that_overflow_come_back_on_their_state_only(tmp_path: Path) -> None:
    """Step 14's update breaks the weights; step 15 overflows with them, and its batch is innocent."""

    def break_weights(session: Session) -> None:
        taken = session.recovery.taken

        def breaking(position: Any, batch_index: int) -> Any:
            if position.step == 13 and not events(tmp_path, "replay"):
                spoil_weights(session.training)
            return taken(position, batch_index)

        session.recovery.taken = breaking  # type: ignore[method-assign]

    run_loop(with_steps(small(), 20), tmp_path, rank=0, world_size=1, change=break_weights)
    same, restored = events(tmp_path, "replay")
    assert (same["step"], same["state"], same["came_back"]) == (15, "same", True)
    assert (same["origin"]["module"], same["origin"]["operation"]) == ("blocks.1.mlp.up", "mm")
    assert (restored["state"], restored["came_back"], restored["origin"]) == ("restored", False, None)


def test_a_run_that_always_fails_is_replayed_so_many_times_and_no_more(tmp_path: Path) -> None:
    from probes.guard.decisions import RunStopped

    config = with_steps(small(recovery={"max_replays": 2}), 20)
    with pytest.raises(RunStopped):
        run_loop(config, tmp_path, rank=0, world_size=1, faults=["failing_data@step=8"])
    told = events(tmp_path, "replay")
    assert {event["step"] for event in told} == {8}
    assert [event["state"] for event in told] == ["same", "restored"] * 2
    assert {event["origin"]["module"] for event in told} == {"head"}
