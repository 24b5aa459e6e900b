"""Mixtures: shares, epochs, every sequence exactly as often as it should be, for any number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.processes import run_ranks
from tests.trainer.data.prepare.prepared_folders import documents, prepare_lines
from tests.trainer.training_runs import RunResult, run_loop, small, with_steps
from trainer.config.config import Config
from trainer.data.batches import Batch, BatchStream
from trainer.data.corpus import Corpus
from trainer.data.mixture import Mixture, MixtureOrder
from trainer.data.prepared import PreparedCorpus
from trainer.rank.loop import Session

Read = dict[int, tuple[tuple[int, ...], torch.Tensor]]
"""Sample ids and inputs of a rank, by the number of the batch."""
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def mixture_of(*num_tokens: int, **shares: tuple[float, ...]) -> Mixture:
    """Corpora whose tokens say which one they are of, in the thousands."""
    parts = {
        str(number): Corpus(tokens=np.arange(size, dtype=np.uint32) + 1000 * number, digest=str(number))
        for number, size in enumerate(num_tokens)
    }
    return Mixture(parts=parts, **shares)


def stream_of(mixture: Mixture, *, seed: int = 0, split: str = "train", ratio: float = 0.0) -> BatchStream:
    return BatchStream(mixture, seq_len=8, global_batch_size=12, seed=seed, validation_ratio=ratio, split=split)


@given(sizes=SIZES, epochs=st.lists(st.integers(0, 3), min_size=4, max_size=4), seed=st.integers(0, 2**31 - 1))
def test_whole_epochs_repeat_each_sequence_as_often_in_every_pass(
    sizes: list[int], epochs: list[int], seed: int
) -> None:
    epochs = [max(1, epochs[0]), *epochs[1 : len(sizes)]]
    mixture = Mixture(parts={}, epochs=tuple(map(float, epochs)))
    order = MixtureOrder(mixture.pass_lengths(sizes), sizes)
    for number in range(2):
        positions = np.arange(order.pass_length) + number * order.pass_length
        parts, numbers = order.samples(positions, seed)
        counted = Counter(zip(parts.tolist(), numbers.tolist(), strict=True))
        expected = {(part, n): epochs[part] for part, size in enumerate(sizes) for n in range(size) if epochs[part]}
        assert counted == expected


@given(sizes=SIZES, weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4))
def test_weights_hold_to_a_sequence_and_no_sequence_runs_ahead(sizes: list[int], weights: list[float]) -> None:
    weights = weights[: len(sizes)]
    mixture = Mixture(parts={}, weights=tuple(weights))
    lengths = mixture.pass_lengths(sizes)
    assert sum(lengths) == sum(sizes)
    for length, weight in zip(lengths, weights, strict=True):
        assert abs(length - weight / sum(weights) * sum(sizes)) < 1
    order = MixtureOrder(lengths, sizes)
    parts, numbers = order.samples(np.arange(3 * order.pass_length), seed=1)
    for part, size in enumerate(sizes):
        counted = Counter(numbers[parts == part].tolist())
        assert sum(counted.values()) == 3 * lengths[part]
        most = -(-sum(counted.values()) // size)
        assert all(most - 1 <= counted[number] <= most for number in range(size))


def test_order_depends_on_seed_and_position_alone() -> None:
    order = MixtureOrder([30, 20], [30, 10])
    positions = np.arange(400)
    parts, numbers = order.samples(positions, seed=5)
    some = np.array([[399, 3], [77, 3]])
    again = MixtureOrder([30, 20], [30, 10]).samples(some, seed=5)
    assert (again[0] == parts[some]).all()
    assert (again[1] == numbers[some]).all()
    assert (order.samples(positions, seed=6)[0] != parts).any()


def test_rows_are_those_of_their_corpus_and_ranks_slice_them() -> None:
    mixture = mixture_of(401, 161, 81, weights=(0.2, 0.3, 0.5))
    single = stream_of(mixture)
    ranks = {size: [stream_of(mixture) for _ in range(size)] for size in (2, 3)}
    counted: Counter[int] = Counter()
    for index in range(20):
        whole = single.batch(index)
        for size, streams in ranks.items():
            parts = [stream.batch(index, rank, size) for rank, stream in enumerate(streams)]
            assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
            assert sum((part.sample_ids for part in parts), ()) == whole.sample_ids
        assert torch.equal(whole.inputs + 1, whole.targets)
        for row, number in enumerate(whole.sample_ids):
            corpus = 0 if number < 50 else 1 if number < 70 else 2
            assert whole.inputs[row, 0] == 1000 * corpus + 8 * (number - (0, 50, 70)[corpus])
            counted[corpus] += 1
    assert [counted[corpus] / 240 for corpus in range(3)] == pytest.approx([0.2, 0.3, 0.5], abs=0.05)


def test_each_corpus_keeps_its_own_end_for_validation() -> None:
    mixture = mixture_of(1000, 1000)
    seen = {int(token) for index in range(40) for token in stream_of(mixture, ratio=0.1).batch(index).targets.flatten()}
    assert {token // 1000 for token in seen} == {0, 1}
    assert max(token % 1000 for token in seen) < 900


# Whole trainings.


def config_of(folders: list[Path], **data: Any) -> Config:
    paths = [str(folder) for folder in folders]
    return small(
        data={"path": paths, "weights": [0.5, 0.3, 0.2], "validation_ratio": 0.0, **data},
        train={"steps": 12, "eval_interval": 6, "eval_batches": 1},
        checkpoint={"interval": 6, "memory_interval": 0},
    )


def recorded(rank: int, world_size: int, config: Config, folder: Path, attempt: int) -> tuple[RunResult, Read]:
    """Train, and return the sequences of each batch that this rank trained on."""
    read: Read = {}

    def record(session: Session) -> None:
        batch_of = session.training.batch

        def batch(index: int) -> Batch:
            made = batch_of(index)
            read[index] = (made.sample_ids, made.inputs.clone())
            return made

        session.training.batch = batch  # type: ignore[method-assign]

    result = run_loop(config, folder, rank=rank, world_size=world_size, attempt=attempt, change=record)
    return result, read


def test_a_mixture_goes_on_over_another_number_of_ranks(tmp_path: Path) -> None:
    folders = [prepare_lines(tmp_path / name, documents(80, seed=seed)) for seed, name in enumerate("abc")]
    held_out = {name: str(prepare_lines(tmp_path / name, documents(40, seed=7))) for name in ("late", "later")}
    config = config_of(folders, validation=held_out)
    whole, expected = recorded(0, 1, config, tmp_path / "whole", 0)
    changed = tmp_path / "changed"
    _, first = recorded(0, 1, with_steps(config, 6), changed, 0)
    ranks = run_ranks(recorded, world_size=2, args=(config, changed, 1))
    assert first.keys() | ranks[0][1].keys() == expected.keys()
    for index, (ids, inputs) in expected.items():
        parts = [first[index]] if index in first else [read[index] for _, read in ranks]
        assert sum((part[0] for part in parts), ()) == ids
        assert torch.equal(torch.cat([part[1] for part in parts]), inputs)
    assert min(ranks[0][1]) == 6
    for step in range(7, 13):
        assert ranks[0][0].losses[step] == pytest.approx(whole.losses[step], rel=1e-4)
    run = RunDir(changed)
    events = read_events(run.rank_dir(1, 0) / "events.jsonl")[0]
    assert not [event for event in events if event["kind"] == "resume_differs"]
    (evaluation,) = [event for event in events if event["kind"] == "evaluation"]
    assert evaluation["sets"].keys() == {"late", "later"}
    assert evaluation["sets"]["late"] == evaluation["sets"]["later"] == pytest.approx(evaluation["loss"])


@pytest.mark.timeout(300)
def test_a_pass_over_three_folders_is_bitwise_the_same_when_the_number_of_ranks_changes_twice(tmp_path: Path) -> None:
    """Also the weights: a step has the same two passes on one rank as on two, and the sum of two gradients does not
    depend on who adds them. The loss that is reported does: two ranks add theirs in float32."""
    folders = [prepare_lines(tmp_path / name, documents(4, seed=seed)) for seed, name in enumerate("abc")]
    config = small(
        data={"path": [str(folder) for folder in folders], "validation_ratio": 0.0},
        train={"global_batch_size": 4, "micro_batch_size": 2},
        parallel={"dp_replicate": -1, "dp_shard": 1},
        checkpoint={"interval": 0, "memory_interval": 0},
    )
    num_sequences = sum((PreparedCorpus(folder).num_tokens - 1) // config.data.seq_len for folder in folders)
    steps = -(-num_sequences // 4)
    config = with_steps(config, steps)
    whole, expected = recorded(0, 1, config, tmp_path / "whole", 0)
    changed = tmp_path / "changed"
    first, reads = recorded(0, 1, with_steps(config, steps // 3), changed, 0)
    second = run_ranks(recorded, world_size=2, args=(with_steps(config, 2 * steps // 3), changed, 1))
    last, reads_last = recorded(0, 1, config, changed, 2)

    read = [[reads[index]] for index in sorted(reads)]
    read += [[read[index] for _, read in second] for index in sorted(second[0][1])]
    read += [[reads_last[index]] for index in sorted(reads_last)]
    assert len(read) == len(expected) == steps
    for parts, (ids, inputs) in zip(read, expected.values(), strict=True):
        assert sum((part[0] for part in parts), ()) == ids
        assert torch.equal(torch.cat([part[1] for part in parts]), inputs)
    ids = [number for parts in read for part in parts for number in part[0]]
    assert sorted(ids[:num_sequences]) == list(range(num_sequences))
    for part in (first, last):
        assert part.losses == {step: whole.losses[step] for step in part.losses}
    for step, loss in second[0][0].losses.items():
        assert loss == pytest.approx(whole.losses[step], rel=1e-6)
    for name, value in whole.tensors.items():
        assert torch.equal(value, last.tensors[name]), name
