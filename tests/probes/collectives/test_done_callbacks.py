"""A group outlives our callbacks on gloo's threads: they need the GIL, which its last owner may hold."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from probes.collectives import call_records
from probes.collectives.done_callbacks import DoneCallbacks
from probes.collectives.gradients import backward_wait
from tests.forked import ForkedPython
from tests.probes.recorded_world import recorded_world
from tests.processes import run_ranks

ROOT = Path(__file__).parents[3]
DELAY_S = 0.3


def _delayed() -> None:
    """Part of a callback: leaves the GIL to the main thread, which ends meanwhile."""
    threading.Event().wait(DELAY_S)


def _ends_with_callback_running(rank: int, world_size: int, folder: str, dropped: bool) -> bool:
    backward_wait.keep_thread_state = call_records.keep_thread_state = _delayed
    with recorded_world(rank, world_size, folder):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        if dropped:
            dist.all_reduce(torch.ones(1 << 20), async_op=True)
        dist.destroy_process_group()
        del model  # the reducer frees the group, and joins gloo's threads with the GIL held
        gc.collect()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `run_ranks` destroys it
    return True


@pytest.mark.parametrize("dropped", [False, True], ids=["of_the_reducer", "of_a_dropped_handle"])
def test_a_run_ends_although_a_callback_has_just_begun(tmp_path: Path, dropped: bool) -> None:
    assert all(run_ranks(_ends_with_callback_running, world_size=2, args=(str(tmp_path), dropped), deadline_s=60))


_SCRIPT = """
import sys, threading
import torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from probes.collectives.gradients import backward_wait
from probes.collectives.wrapped import install
from probes.tape_recorder import TapeRecorder

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
install(TapeRecorder(folder / sys.argv[2], rank=rank, attempt=0, world_size=2))
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
backward_wait.keep_thread_state = lambda: threading.Event().wait(3)
model(torch.ones(1, 4)).sum().backward()
"""


def test_a_process_ends_well_although_a_callback_has_just_begun(tmp_path: Path) -> None:
    """A real interpreter: as it ends, Python ends a thread that asks for the GIL, and pybind11 aborts the process.

    Its peer is a fork, which ends without that.
    """
    words = [["-c", _SCRIPT, str(tmp_path), str(rank)] for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, *words[0]], cwd=ROOT, stderr=subprocess.PIPE),
        ForkedPython(words[1], cwd=ROOT, stderr=subprocess.PIPE),
    ]
    errors = [rank.communicate(timeout=100)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_a_collective_in_flight_is_not_waited_for_long() -> None:
    callbacks = DoneCallbacks()
    future: torch.futures.Future[None] = torch.futures.Future()
    callbacks.add(future, lambda done: None)
    callbacks.wait()  # its peers may be gone
    assert not future.done()
    future.set_result(None)
    callbacks.wait()


def test_a_group_is_kept_until_no_callback_is_to_come() -> None:
    callbacks, group = DoneCallbacks(), _Group()
    future: torch.futures.Future[None] = torch.futures.Future()
    callbacks.add(future, lambda done: None)
    callbacks.keep(group)
    kept = weakref.ref(group)
    del group
    callbacks.release()
    assert kept() is not None, "gloo's thread may still call back"
    future.set_result(None)
    callbacks.release()
    assert kept() is None


def test_a_group_without_callbacks_is_not_kept() -> None:
    callbacks, group = DoneCallbacks(), _Group()
    callbacks.keep(group)
    kept = weakref.ref(group)
    del group
    assert kept() is None


class _Group:
    """Stands for torch's."""
