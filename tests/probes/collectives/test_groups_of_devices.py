"""Groups whose calls run on a device stay torch's own; recorded ones split, merge and end like torch's own."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from probes.collectives import wrapped
from probes.collectives.call_records import Calls
from probes.collectives.existing_groups import record_existing
from probes.collectives.work_handle import RecordedWork
from probes.collectives.wrapped import RecordedGroup, install, uninstall
from probes.tape.events import read_events
from probes.tape.format.writer import COMPLETE
from probes.tape_recorder import TapeRecorder
from tests.forked import run_python
from tests.probes.recorded_world import rows
from tests.processes import run_ranks
from tests.waiting import wait_for


class BatchingBackend(dist.ProcessGroupGloo):
    """Played NCCL: gloo that says of itself what NCCL does."""

    supports_coalescing = True


_held: list[BatchingBackend] = []  # C++ keeps the backend, and not what Python adds to it


def _batching(options: Any, _: Any) -> BatchingBackend:
    backend = BatchingBackend(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    _held.append(backend)
    return backend


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TapeRecorder]:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    recorder = TapeRecorder(tmp_path / "rank", rank=0, attempt=0)
    yield recorder
    uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()
    recorder.close()


def _groups(directory: Path) -> list[tuple[str, str]]:
    events = read_events(directory / "events.jsonl")[0]
    return [(e["process_group"], e["recorded_by"]) for e in events if e["kind"] == "process_group"]


def _played(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Groups made before and after recording begins; what is recorded, and by what."""
    dist.destroy_process_group()
    dist.Backend.register_backend("played_nccl", _batching, extended_api=True, devices=["cpu"])
    found: dict[str, Any] = {}
    for has_plugin in (True, False):
        recorder = TapeRecorder(Path(folder) / str(has_plugin), rank=0, attempt=0)
        if has_plugin:
            install(recorder, has_plugin=True)
        dist.init_process_group("played_nccl", store=dist.HashStore(), rank=0, world_size=1)
        if not has_plugin:
            install(recorder)
            record_existing([])
        type_of_world = type(dist.group.WORLD) is c10d.ProcessGroup
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(4), group=dist.new_group(backend="gloo"))
        shapes = [row["shape"] for row in rows(recorder.directory, "collectives")]
        found[str(has_plugin)] = (type_of_world, shapes, _groups(recorder.directory))
        dist.destroy_process_group()
        uninstall()
        recorder.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which `run_ranks` ends
    return found


def test_a_group_that_batches_on_a_device_stays_torchs_own(tmp_path: Path) -> None:
    """`batch_isend_irecv` batches its calls only where the type of the group is torch's own."""
    (found,) = run_ranks(_played, world_size=1, args=(str(tmp_path),))
    assert found["True"] == (True, ["4"], [("world:0", "nccl_plugin"), ("group:0", "wrapper")])
    assert found["False"] == (True, ["4"], [("world:0", "nothing"), ("group:0", "wrapper")])


def test_a_call_on_a_device_leaves_no_open_record(recorder: TapeRecorder) -> None:
    """The host has enqueued it and is in its loader: an open record would say that it waits for the network."""
    install(recorder)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    assert type(dist.group.WORLD) is RecordedGroup
    with FakeTensorMode():
        on_device = torch.empty(8, device="cuda")
        dist.all_reduce(on_device)
        work = dist.all_reduce(on_device, async_op=True)
    assert work is not None
    dist.all_reduce(torch.ones(2))
    found = rows(recorder.directory, "collectives")
    assert [(row["shape"], row["seq"], row["state"]) for row in found] == [("2", 0, COMPLETE)]
    assert recorder.wait_ns < 10**9


_SPLIT_AND_MERGE = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from probes.collectives.wrapped import install
from probes.tape_recorder import TapeRecorder

install(TapeRecorder(Path(sys.argv[1]), rank=0, attempt=0))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
half = dist.group.WORLD.split_group([0], timeout=timedelta(seconds=60), group_name="half", group_desc="half")
half.allreduce([torch.ones(3)]).wait()
whole = half.merge_remote_group(dist.HashStore(), 1, group_name="whole")
whole.allreduce([torch.ones(5)]).wait()
print(*(type(group).__name__ for group in (half, whole)), half.group_name, whole.group_name, half.rank())
"""


def test_recorded_groups_split_and_merge(tmp_path: Path) -> None:
    """In C++ both ask the group for its store, which a subclass in Python has not: every rank segfaulted.

    In a process of its own: torch 2.13 also segfaults, without us, where another gloo group was destroyed before.
    """
    done = run_python(["-c", _SPLIT_AND_MERGE, str(tmp_path)])
    assert done.stdout.split() == ["RecordedGroup", "RecordedGroup", "half", "whole", "0"], done.stderr
    assert {row["shape"] for row in rows(tmp_path, "collectives")} == {"3", "5"}


def test_after_detach_every_group_is_torchs_own(recorder: TapeRecorder) -> None:
    install(recorder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    held = dist.group.WORLD
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert type(model.process_group) is RecordedGroup
    dist.all_reduce(torch.ones(1))
    before = len(rows(recorder.directory, "collectives"))
    uninstall()
    for group in (dist.group.WORLD, mesh.get_group("dp"), mesh.get_group("tp"), model.process_group):
        assert type(group) is c10d.ProcessGroup
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=held)  # what a local variable holds still works
    model(torch.ones(1, 2)).sum().backward()
    assert len(rows(recorder.directory, "collectives")) == before > 0


def test_a_dropped_handle_completes_its_record_without_another_call(recorder: TapeRecorder) -> None:
    install(recorder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1 << 20), async_op=True)
    wait_for(lambda: [row["state"] for row in rows(recorder.directory, "collectives")] == [COMPLETE], "complete record")


class _OrdersStreams:
    """A handle of gloo whose calls that order streams do so on a played device; without one gloo refuses the second."""

    def __init__(self, real: dist.Work) -> None:
        self.real = real
        self.asked: list[str] = []
        self.synchronize = lambda: self.asked.append("synchronize")
        self.block_current_stream = lambda: self.asked.append("block_current_stream")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.mark.parametrize("order", ["synchronize", "block_current_stream"])
def test_a_handle_that_only_orders_streams_completes_its_record(recorder: TapeRecorder, order: str) -> None:
    """Neither makes the host wait: no `wait` and no later call of the loop may be needed to see the end."""
    install(recorder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    assert type(work) is RecordedWork
    on_device = _OrdersStreams(work._real)
    work._real = on_device  # type: ignore[assignment]
    getattr(work, order)()
    assert on_device.asked == [order]
    del work
    wait_for(lambda: [row["state"] for row in rows(recorder.directory, "collectives")] == [COMPLETE], "complete record")


def test_a_kept_handle_completes_its_record_when_it_is_asked(recorder: TapeRecorder) -> None:
    install(recorder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    wait_for(work.is_completed, "end of the call")
    assert [row["state"] for row in rows(recorder.directory, "collectives")] == [COMPLETE]


def test_a_thread_of_autograd_that_has_logged_still_trains(recorder: TapeRecorder) -> None:
    """`logging` asks for the current thread, which makes an entry for one that Python did not start."""
    calls = Calls(recorder, check_nonfinite=False)
    seen: list[bool] = []

    def foreign() -> None:
        entry = threading._active.pop(threading.get_ident())  # type: ignore[attr-defined]
        seen.append(calls.is_training())  # as in a thread of C++
        logging.getLogger("of a hook").debug("here")
        threading.current_thread()
        assert threading.get_ident() in threading._active  # type: ignore[attr-defined]
        seen.append(calls.is_training())
        threading._active[threading.get_ident()] = entry  # type: ignore[attr-defined]
        seen.append(calls.is_training())  # one that Python did start, as a checkpoint does

    thread = threading.Thread(target=foreign)
    thread.start()
    thread.join()
    assert seen == [True, True, False]


def test_a_reducer_is_gone_before_another_is_made(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    before = ref(model.reducer)
    alive: list[bool] = []
    real = nn.parallel.DistributedDataParallel._ddp_init_helper

    def looks(*args: Any) -> None:
        gc.collect()
        alive.append(before() is not None)
        real(*args)

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_ddp_init_helper", looks)
    install(recorder)
    record_existing([model])
    assert alive == [False]
    model(torch.ones(1, 2)).sum().backward()
    assert [row["state"] for row in rows(recorder.directory, "collectives")] == [COMPLETE]


def test_a_bucket_that_ends_within_backward_is_recorded_so(recorder: TapeRecorder) -> None:
    """DDP waits for all buckets when backward is over: an end taken there would make each of them the last."""
    install(recorder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    between: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            hidden = self.layers[0](value)
            hidden.register_hook(first_bucket_has_ended)
            return self.layers[1](hidden).sum()

    def first_bucket_has_ended(gradient: torch.Tensor) -> None:
        assert wrapped._probe is not None
        if len(between) == 1:  # DDP cuts its buckets in the first backward pass
            waiting = wrapped._probe.backward._expected
            wait_for(lambda: waiting and waiting[0][0].end_ns, "end of the first bucket")
        between.append(time.monotonic_ns())

    model = nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=0.01)
    for _ in range(2):
        model(torch.ones(1, 64)).backward()
    first, second = [row for row in rows(recorder.directory, "collectives") if row["op"] == "all_reduce"][-2:]
    assert first["end_ns"] < between[1] < second["issue_ns"]
