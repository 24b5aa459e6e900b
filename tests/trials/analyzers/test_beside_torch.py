"""Exposed communication of real steps, as Rankscope and as torch's profiler measure it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analyzers.account.device.exposure import measure
from probes.tape.rundir import RunDir
from store import Store
from store.readers.traces.kineto import read_trace
from store.readers.traces.rank_traces import breakdown
from tests.processes import end_group, run_ranks

STEPS, WARM_UP, LINK_BYTES_PER_S = 10, 2, 25_000_000


def profiled(rank: int, world_size: int, folder: str) -> None:
    """Real DDP steps over a link that the kernel paces, recorded by us and by torch's profiler at the same time."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    from probes.collectives.wrapped import install, uninstall
    from probes.tape_recorder import TapeRecorder
    from trainer.faults.injectors.timing import _pace

    torch.set_num_threads(1)
    run = RunDir(Path(folder))
    end_group()
    recorder = TapeRecorder(run.rank_dir(0, rank), rank=rank, attempt=0, world_size=world_size)
    install(recorder)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    assert _pace(LINK_BYTES_PER_S)
    handler = tensorboard_trace_handler(f"{folder}/traces", worker_name=f"worker{rank}")
    plan = schedule(wait=0, warmup=WARM_UP, active=STEPS)
    batch = torch.randn(1024, 512)  # on a fast machine, too, the backward pass hides a good part
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler) as profiler:
        for step in range(WARM_UP + STEPS):
            with recorder.step(step):
                with recorder.span("forward"):
                    loss = model(batch).square().mean()
                with recorder.span("backward"):
                    loss.backward()
                with recorder.span("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
            if step < WARM_UP + STEPS - 1:
                profiler.step()
    uninstall()
    recorder.close()


def test_exposed_communication_agrees_with_torch_profiler(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", name="profiled", manifest={"world_size": 2})
    run_ranks(profiled, world_size=2, args=(str(run.path),))
    with Store.open(run) as store:
        ours = measure(store, 0, since_step=WARM_UP)
    assert ours.num_steps == STEPS
    for path in sorted((run.path / "traces").iterdir()):
        trace = read_trace(path)
        theirs = breakdown(trace)
        own = ours.rank == trace.rank
        assert np.array_equal(ours.step[own], trace.steps)
        ratios = ours.exposed_ms[own] / theirs["exposed"]
        assert np.median(ratios) == pytest.approx(1.0, abs=0.05), (ours.exposed_ms[own], theirs["exposed"])
        # There is something to tell apart: part of the communication is hidden, and part is not.
        assert 0.2 < np.sum(ours.exposed_ms[own]) / np.sum(ours.busy_ms[own]) < 0.95
