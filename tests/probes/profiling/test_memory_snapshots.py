"""Snapshots of CUDA memory that ran out: what they show, what is written, and that nothing is said without CUDA."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from probes.profiling.attach import profile_steps
from probes.profiling.memory_snapshots import record_exception, reduced
from probes.profiling.memory_state import summarise
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from tests.probes.profiling.played_memory import SEGMENT_BYTES, PlayedMemory

MESSAGE = (
    "CUDA out of memory. Tried to allocate 8.00 MiB. GPU 1 has a total capacity of 79.15 GiB of which 3.00 MiB is free."
    " Of the allocated memory 16.00 MiB is allocated by PyTorch, and 24.00 MiB is reserved by PyTorch but unallocated."
)


def exhausted(*, history: bool = True) -> PlayedMemory:
    """Parameters and activations, then a request that is refused; one activation is freed while the stack unwinds."""
    cuda = PlayedMemory(history=history)
    cuda.alloc(10 << 20, "model.py", 12)
    activation = cuda.alloc(4 << 20, "attention.py", 88)
    cuda.alloc(2 << 20, "attention.py", 88, segment=1)
    cuda.fail(8 << 20, "mlp.py", 31)
    cuda.free(activation)
    return cuda


def test_the_played_snapshot_has_torchs_shape() -> None:
    shown = exhausted().snapshot()
    assert "40.0MiB" in _memory_viz.segsum(shown)  # type: ignore[no-untyped-call]  # torch: no types
    assert "OutOfMemoryError # 8.0MiB requested" in _memory_viz.trace(shown)  # type: ignore[no-untyped-call]  # torch: no types


def test_the_state_is_that_of_the_failure_and_not_that_of_the_end() -> None:
    state = summarise(exhausted().snapshot())
    assert (state.device, state.is_at_failure, state.has_stacks) == (1, True, True)
    assert (state.reserved_bytes, state.allocated_bytes) == (2 * SEGMENT_BYTES, 16 << 20)
    assert (state.requested_bytes, state.device_free_bytes, state.asked_at) == (
        8 << 20, 3 << 20, "gpt/mlp.py:31 in forward",
    )  # fmt: skip
    assert [(site.at, site.bytes >> 20, site.blocks) for site in state.sites] == [
        ("gpt/model.py:12 in forward", 10, 1), ("gpt/attention.py:88 in forward", 6, 2),
    ]  # fmt: skip


def test_what_was_allocated_after_the_failure_was_not_in_use_then() -> None:
    cuda = exhausted()
    cuda.alloc(1 << 20, "handler.py", 5, segment=1)
    assert summarise(cuda.snapshot()).allocated_bytes == 16 << 20


def test_without_a_history_sizes_are_known_and_lines_are_not() -> None:
    state = summarise(exhausted(history=False).snapshot())
    assert (state.has_stacks, state.is_at_failure, state.requested_bytes, state.asked_at) == (False, False, None, "")
    assert (state.reserved_bytes, state.allocated_bytes) == (2 * SEGMENT_BYTES, 12 << 20)
    assert [site.at for site in state.sites] == [""]


@pytest.mark.parametrize("content", [{}, {"segments": 3}, {"segments": [7], "device_traces": [[None], 4]}])
def test_a_snapshot_of_nothing_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no memory of a CUDA device"):
        summarise(content)


def test_values_of_the_wrong_type_are_left_out() -> None:
    shown = exhausted().snapshot()
    shown["segments"][0]["blocks"][0] |= {"size": "large", "frames": [{"filename": 4}, None, {"filename": "/a/b.py"}]}
    shown["device_traces"][1][-1]["addr"] = -1
    state = summarise(shown)
    assert state.allocated_bytes == 6 << 20
    assert {site.at for site in state.sites} == {"gpt/attention.py:88 in forward", "a/b.py:?"}


def test_a_snapshot_is_cut_to_its_size_and_keeps_the_largest_blocks() -> None:
    cuda = PlayedMemory()
    for number in range(200):
        cuda.alloc((number + 1) << 8, "model.py", number)
    whole = reduced(cuda.snapshot())
    assert whole["left_out"] == {"trace_entries": 0, "stacks": 0, "blocks": 0}
    assert summarise(whole) == summarise(cuda.snapshot())
    small = reduced(cuda.snapshot(), max_bytes=20_000)
    assert len(json.dumps(small)) < 24_000
    assert all(small["left_out"].values())
    blocks = [block for block in small["segments"][0]["blocks"] if block["state"] == "active_allocated"]
    assert max(block["size"] for block in blocks) == 200 << 8
    assert "frames" in max(blocks, key=lambda block: block["size"])
    assert small["device_traces"][1][-1]["time_us"] == 199


class Rank:
    """Rank 3 on a played CUDA device."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, cuda: PlayedMemory | None, history: int) -> None:
        self.recorded: list[Any] = []
        monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
        if cuda is not None:
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.cuda, "init", lambda: None)
            monkeypatch.setattr(torch.cuda.memory, "_snapshot", cuda.snapshot)
            monkeypatch.setattr(torch.cuda.memory, "_record_memory_history",
                                lambda *given, **named: self.recorded.append((given, named)))  # fmt: skip
        self.run, _ = RunDir.adopt(folder / "run")
        self.recorder = TapeRecorder(self.run.rank_dir(0, 3), rank=3, attempt=0, world_size=4)
        profile_steps(self.run, self.recorder, {"profiler": {"memory_history": history}}, node_rank=0)

    def die(self, error: BaseException) -> list[dict[str, Any]]:
        """The events of its end."""
        record_exception(self.recorder, error)
        events = read_events(self.run.rank_dir(0, 3) / "events.jsonl")[0]
        return [event for event in events if event["kind"] in ("exception", "memory_snapshot")]


def test_a_rank_that_runs_out_writes_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, monkeypatch, exhausted(), 500)
    assert rank.recorded == [(("all",), {"context": "alloc", "stacks": "python", "max_entries": 500})]
    failed = RuntimeError("a hook failed")
    failed.__cause__ = torch.OutOfMemoryError(MESSAGE)
    died, snapshot = rank.die(failed)
    assert (died["kind"], snapshot["kind"]) == ("exception", "memory_snapshot")
    assert snapshot["path"] == "memory/attempt-0/rank-00003-memory.json.gz"
    path = rank.run.path / snapshot["path"]
    assert path.stat().st_size == snapshot["bytes"]
    assert (snapshot["requested_bytes"], snapshot["unused_bytes"]) == (8 << 20, 24 << 20)
    assert snapshot["sites"][0] == {"at": "gpt/model.py:12 in forward", "bytes": 10 << 20, "blocks": 1}
    assert summarise(json.loads(gzip.decompress(path.read_bytes()))).allocated_bytes == snapshot["allocated_bytes"]
    assert len(rank.die(failed)) == 3, "the snapshot is written once"


def test_without_history_the_message_says_what_was_unused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path, monkeypatch, exhausted(history=False), 0)
    assert rank.recorded == []
    _, snapshot = rank.die(torch.OutOfMemoryError(MESSAGE))
    assert (snapshot["unused_bytes"], snapshot["requested_bytes"], snapshot["has_stacks"]) == (24 << 20, None, False)
    rank = Rank(tmp_path / "other", monkeypatch, exhausted(history=False), 0)
    assert rank.die(torch.OutOfMemoryError("out of memory"))[1]["unused_bytes"] is None


def test_other_errors_and_a_cpu_write_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(tmp_path / "cpu", monkeypatch, None, 500)
    assert [event["kind"] for event in rank.die(torch.OutOfMemoryError(MESSAGE))] == ["exception"]
    rank = Rank(tmp_path / "cuda", monkeypatch, exhausted(), 500)
    assert [event["kind"] for event in rank.die(MemoryError())] == ["exception"]
    assert not (rank.run.path / "memory").exists()
