"""Resumes: what is not as it was saved is named, and a resume that is right says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.processes import run_ranks
from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.checkpoint.continuity import data_differs, differing, order_signature, signature
from trainer.checkpoint.disk_tier import checkpoints as disk
from trainer.checkpoint.state import Position
from trainer.config.config import Config
from trainer.data.batches import BatchStream
from trainer.data.corpus import open_corpus
from trainer.data.streams import training_stream

DDP: dict[str, Any] = {"dp_replicate": 2, "dp_shard": 1}
FSDP: dict[str, Any] = {"dp_shard": 2}


def differences(folder: Path, attempt: int, rank: int = 0) -> list[list[str]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, rank) / "events.jsonl")
    return [event["parts"] for event in events if event["kind"] == "resume_differs"]


def spent(folder: Path, kind: str, rank: int) -> None:
    """As if the fault had struck in the attempt before."""
    marker = folder / "faults" / f"0-{kind}-rank-{rank}"
    marker.parent.mkdir()
    marker.touch()


@pytest.mark.parametrize(
    ("where", "part"),
    [("rng", "rng"), ("parameter", "parameters"), ("optimizer", "optimizer"), ("data", "data")],
)
def test_what_is_not_restored_is_named(where: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "load_folder", disk.load_folder)  # the fault replaces it for the rest of its process
    config = with_steps(small(model={"dropout": 0.1}), 12)
    faults = [f"skip_restore@step=9,rank=0,where={where}"]
    run_loop(config, tmp_path, rank=0, world_size=1, stop_at_step=8)
    spent(tmp_path, "skip_restore", 0)
    torch.manual_seed(99)  # a new process would begin with other generators
    run_loop(config, tmp_path, rank=0, world_size=1, attempt=1, faults=faults)
    assert differences(tmp_path, 1) == [[part]]


def test_changed_data_are_named(tmp_path: Path) -> None:
    run_loop(with_steps(small(), 12), tmp_path, rank=0, world_size=1, stop_at_step=8)
    run_loop(with_steps(small(run={"seed": 5}), 12), tmp_path, rank=0, world_size=1, attempt=1)
    assert differences(tmp_path, 1) == [["data"]]


def test_an_edit_far_from_the_next_batch_is_named(tmp_path: Path) -> None:
    """Of a text, and of tokens in a .bin of which only samples are read; neither number of tokens changes."""
    text, tokens = tmp_path / "a.txt", tmp_path / "train.bin"
    text.write_text("abcdefgh" * 4096)
    np.tile(np.arange(256, dtype=np.uint16), 4096).tofile(tokens)
    described = {"dtype": "uint16", "vocab_size": 256, "num_tokens": 4096 * 256}
    tokens.with_suffix(".json").write_text(json.dumps(described))
    at = Position(step=8, batch_index=8)
    for path, unseen in ((text, 0), (tokens, 1 << 20)):
        stream = _stream(path, tmp_path)
        extra = {"corpus": stream.corpus.digest, "order": order_signature(stream, at)}
        assert not data_differs(extra, _stream(path, tmp_path), at)
        content = bytearray(path.read_bytes())
        size = 1 << 16 if path == tokens else 1  # a longer edit than the distance of two samples
        content[unseen : unseen + size] = bytes(size)
        path.write_bytes(content)
        edited = _stream(path, tmp_path)
        assert edited.num_sequences == stream.num_sequences
        assert order_signature(edited, at) == extra["order"]
        assert data_differs(extra, edited, at)
        assert not data_differs({"order": extra["order"]}, edited, at), "saved by an older version"


def _stream(path: Path, cache: Path) -> BatchStream:
    config = small(data={"path": [str(path)], "cache_dir": str(cache / "cache"), "seq_len": 16})
    return training_stream(config, open_corpus(config.data, config.model.vocab_size))


def test_changed_data_are_named_with_memory_copies(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("abcdefgh" * 4096)
    data = {"path": [str(text)], "cache_dir": str(tmp_path / "cache")}
    run_loop(with_steps(small(data=data), 12), tmp_path / "run", rank=0, world_size=1, stop_at_step=8)
    text.write_text("bbcdefgh" + "abcdefgh" * 4095)
    run_loop(with_steps(small(data=data), 12), tmp_path / "run", rank=0, world_size=1, attempt=1)
    assert differences(tmp_path / "run", 1) == [["data"]]


def _resumed(rank: int, world_size: int, folder: Path, config: Config, other: Config) -> None:
    run_loop(config, folder, rank=rank, world_size=world_size, stop_at_step=8)
    run_loop(config, folder, rank=rank, world_size=world_size, attempt=1, stop_at_step=10)
    run_loop(other, folder, rank=rank, world_size=world_size, attempt=2)


def test_a_resume_is_silent_on_the_same_mesh_and_on_another(tmp_path: Path) -> None:
    config, other = (with_steps(small(model={"dropout": 0.1}, parallel=mesh), 12) for mesh in (FSDP, DDP))
    run_ranks(_resumed, world_size=2, args=(tmp_path, config, other), deadline_s=60)
    assert [differences(tmp_path, attempt, rank) for attempt in (1, 2) for rank in (0, 1)] == [[], [], [], []]


def test_a_signature_covers_each_part_of_the_state() -> None:
    tensors = {"model.a": torch.ones(3), "model.b": torch.zeros(3), "optimizer.a.step": torch.tensor(2.0)}
    rng = {"torch": torch.arange(8)}
    before = signature(tensors, rng)
    assert list(before) == ["parameters", "optimizer", "rng"]
    swapped = tensors | {"model.a": tensors["model.b"], "model.b": tensors["model.a"]}
    assert differing(before, signature(swapped, rng)) == ["parameters"], "also which tensor holds what"
    assert differing(before, signature(tensors, {"torch": torch.arange(1, 9)})) == ["rng"]
    assert differing({}, before) == [], "a checkpoint that holds none cannot be compared with"


def test_the_order_of_the_data_has_one_of_each_position(tmp_path: Path) -> None:
    from trainer.layout.resolve import resolve
    from trainer.training.build import build

    config = small()
    stream = build(config, resolve(config, 1), torch.device("cpu")).stream
    found = [order_signature(stream, Position(step=0, batch_index=index)) for index in (0, 1, 1)]
    assert found[0] != found[1] == found[2]
