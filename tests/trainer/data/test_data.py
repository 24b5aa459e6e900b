"""Batches are a pure function of their number, and every layout reads the same ones."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.training_runs import small
from tests.waiting import wait_for
from trainer.config.config import DataConfig
from trainer.config.load import ConfigError
from trainer.data.batches import Batch, BatchStream
from trainer.data.corpus import Corpus, open_corpus
from trainer.data.permutation import permute
from trainer.data.prefetch import Prefetcher
from trainer.layout.resolve import resolve
from trainer.training.build import build
from watch.processes import is_alive


def stream_of(num_tokens: int = 1000, split: str = "train", seed: int = 0) -> BatchStream:
    corpus = Corpus(tokens=np.arange(num_tokens, dtype=np.uint16), digest="")
    return BatchStream(corpus, seq_len=8, global_batch_size=12, seed=seed, validation_ratio=0.1, split=split)


@pytest.mark.parametrize("data_size", [1, 2, 3, 4, 6, 12])
def test_data_ranks_slice_one_global_batch(data_size: int) -> None:
    stream = stream_of()
    for index in (0, 3, 1000):
        whole = stream.batch(index)
        parts = [stream.batch(index, rank, data_size) for rank in range(data_size)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
        assert sum((part.sample_ids for part in parts), ()) == whole.sample_ids == stream.sample_ids(index)


def test_a_batch_does_not_depend_on_what_was_asked_before() -> None:
    stream = stream_of()
    forward = [stream.batch(index).sample_ids for index in range(20)]
    assert [stream_of().batch(index).sample_ids for index in reversed(range(20))] == forward[::-1]
    assert [stream_of(seed=1).batch(index).sample_ids for index in range(20)] != forward


def test_an_epoch_has_every_sequence_once() -> None:
    stream = stream_of()
    ids = [number for index in range(200) for number in stream.sample_ids(index)]
    size = stream.num_sequences
    epochs = [ids[start : start + size] for start in range(0, 10 * size, size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10


def test_the_last_sequence_has_its_last_target_in_its_own_split() -> None:
    stream = stream_of(num_tokens=160)  # 144 to train with, 18 times the length; the last one is no input
    assert stream.num_sequences == 17
    batches = [stream.batch(index) for index in range(3)]
    assert max(int(batch.targets.max()) for batch in batches) < 144


def test_targets_are_one_token_ahead() -> None:
    batch = stream_of().batch(5)
    assert batch.inputs.shape == batch.targets.shape == (12, 8)
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert batch.inputs[0, 0] == batch.sample_ids[0] * 8


def test_splits_do_not_overlap() -> None:
    train, validation = stream_of(), stream_of(split="validation")
    seen = {int(token) for index in range(50) for token in train.batch(index).targets.flatten()}
    held_out = {int(token) for index in range(50) for token in validation.batch(index).inputs.flatten()}
    assert max(seen) < min(held_out)
    assert validation.sample_ids(0) == tuple(range(12))
    assert validation.sample_ids(1) == validation.sample_ids(0)


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000))
def test_permutation_contains_each_number_once(count: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(count), count, (seed, epoch))
    assert sorted(order) == list(range(count))


def test_default_corpus_is_the_standard_library(tmp_path: Path) -> None:
    config = DataConfig(cache_dir=str(tmp_path))
    corpus = open_corpus(config, 256)
    assert len(corpus.tokens) > 5_000_000
    assert isinstance(corpus.tokens, np.memmap)
    name, offset = corpus.locate(corpus.starts[100] + 10)
    assert (name, offset) == (corpus.names[100], 10)
    assert list(corpus.names) == sorted(corpus.names)
    (cached,) = tmp_path.iterdir()
    before = cached.stat().st_mtime_ns
    assert open_corpus(config, 256).digest == corpus.digest
    assert cached.stat().st_mtime_ns == before


def test_text_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("bb")
    (folder / "deep" / "a.md").write_text("aaa")
    (folder / ".hidden").write_text("no")
    (tmp_path / "c.txt").write_text("c")
    config = DataConfig(path=[str(folder), str(tmp_path / "c.txt")], cache_dir=str(tmp_path / "cache"))
    corpus = open_corpus(config, 256)
    assert corpus.tokens.tobytes() == b"bb\0aaa\0c\0"
    assert corpus.names == ("texts/b.txt", "texts/deep/a.md", "c.txt")


def test_cache_that_cannot_be_written_costs_only_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "a.txt").write_text("abc")
    corpus = open_corpus(DataConfig(path=[str(tmp_path / "a.txt")], cache_dir=str(tmp_path / "file" / "no")), 256)
    assert corpus.tokens.tobytes() == b"abc\0"


def write_bin(folder: Path, sidecar: object, tokens: int = 100) -> str:
    path = folder / "train.bin"
    np.arange(tokens, dtype=np.uint16).tofile(path)
    path.with_suffix(".json").write_text(sidecar if isinstance(sidecar, str) else json.dumps(sidecar))
    return str(path)


def test_bin_with_sidecar(tmp_path: Path) -> None:
    path = write_bin(tmp_path, {"dtype": "uint16", "vocab_size": 100, "num_tokens": 100})
    corpus = open_corpus(DataConfig(path=[path]), 128)
    assert corpus.tokens[-1] == 99
    assert corpus.locate(7) == ("", 7)


@pytest.mark.parametrize(
    ("sidecar", "expected"),
    [
        ("{", "must be a JSON object"),
        ([1], "must be a JSON object"),
        ({"dtype": "uint16"}, "must be a JSON object"),
        ({"dtype": "float32", "vocab_size": 100, "num_tokens": 100}, "dtype 'float32' must be one of"),
        ({"dtype": "uint16", "vocab_size": 1000, "num_tokens": 100}, "model.vocab_size = 128"),
        ({"dtype": "uint16", "vocab_size": 100, "num_tokens": 101}, "200 bytes, but train.json says 202"),
    ],
)
def test_bin_that_is_not_what_it_says(tmp_path: Path, sidecar: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_corpus(DataConfig(path=[write_bin(tmp_path, sidecar)]), 128)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        open_corpus(DataConfig(path=[str(tmp_path / "none")]), 256)
    with pytest.raises(ConfigError, match="holds no text"):
        open_corpus(DataConfig(path=[str(tmp_path)]), 256)
    (tmp_path / "short.txt").write_text("abc")
    corpus = open_corpus(DataConfig(path=[str(tmp_path / "short.txt")], cache_dir=str(tmp_path / "c")), 256)
    with pytest.raises(ConfigError, match=r"data\.seq_len = 8: the train split has 4 tokens"):
        BatchStream(corpus, seq_len=8, global_batch_size=1, seed=0, validation_ratio=0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_prefetched_batches_are_the_same_ones(num_workers: int) -> None:
    stream = stream_of()
    loader = Prefetcher(stream, 1, 3, num_workers=num_workers, ahead=2, pin=False)
    # In order, a repeated one (rollback), in order again, one further on (skip), one long before.
    for index in (0, 1, 2, 3, 2, 3, 4, 9, 10, 0):
        expected = stream.batch(index, 1, 3)
        batch = loader.batch(index)
        assert (batch.index, batch.sample_ids) == (index, expected.sample_ids)
        assert torch.equal(batch.inputs, expected.inputs)
        assert torch.equal(batch.targets, expected.targets)
    loader.close()


def test_workers_have_as_many_batches_ready_as_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker computes `data.prefetch` batches before the first is taken, and one more for each that is taken."""
    data = {"num_workers": 1, "prefetch": 3}
    training = build(small(data=data), resolve(small(data=data), 1), torch.device("cpu"))
    made = multiprocessing.get_context("fork").Queue()
    inner = BatchStream.batch

    def counted(stream: BatchStream, index: int, data_rank: int, data_size: int) -> Batch:
        made.put(index)
        return inner(stream, index, data_rank, data_size)

    monkeypatch.setattr(BatchStream, "batch", counted)  # the worker is forked after it
    training.batch(0)
    assert [made.get(timeout=60) for _ in range(4)] == [0, 1, 2, 3]
    training.batch(1)
    assert made.get(timeout=60) == 4
    assert made.empty()
    training.close()


def test_prefetching_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    loader = Prefetcher(stream_of(), 0, 1, num_workers=1, ahead=1, pin=False)
    loader.batch(0)
    loader.close()
    assert torch.equal(torch.rand(1), expected)


class _Endless:
    """A stream whose first batch never comes; `worker` gets the pid of the process that makes it."""

    def __init__(self, worker: Path) -> None:
        self.worker = worker

    def batch(self, batch_index: int, data_rank: int, data_size: int) -> Batch:
        self.worker.write_text(str(os.getpid()))
        signal.pause()
        raise AssertionError


def _wait_for_endless(worker: Path) -> None:
    Prefetcher(_Endless(worker), 0, 1, num_workers=1, ahead=1, pin=False).batch(0)  # type: ignore[arg-type]


def test_a_worker_that_is_stuck_in_a_batch_ends_with_its_rank(tmp_path: Path) -> None:
    worker = tmp_path / "pid"
    rank = multiprocessing.get_context("fork").Process(target=_wait_for_endless, args=(worker,))
    rank.start()
    wait_for(lambda: worker.exists() and worker.read_text(), "the worker")
    rank.kill()
    rank.join()
    wait_for(lambda: not is_alive(int(worker.read_text())), "the worker's end")


def test_a_killed_data_worker_is_an_error() -> None:
    loader = Prefetcher(stream_of(), 0, 1, num_workers=1, ahead=1, pin=False)
    loader.batch(0)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None

    def killed(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)  # torch raises as soon as it is dead, wherever this thread is
        for index in range(1, 10):
            loader.batch(index)

    with pytest.raises(RuntimeError, match=f"pid\\(s\\) {worker.pid}|pid {worker.pid}"):
        killed(worker.pid)
    loader.close()
