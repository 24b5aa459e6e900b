"""Every kind of call passes through the recorded group, changes nothing, and leaves its record."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from probes.collectives import wrapped as collectives
from probes.collectives.call_records import Calls
from probes.collectives.methods import METHODS
from probes.collectives.wrapped import install, uninstall
from probes.fail_open import error_counts
from probes.recorder import NullRecorder
from probes.tape.format.writer import COMPLETE, OPEN
from probes.tape_recorder import TapeRecorder
from tests.probes.recorded_world import recorded_world, rows
from tests.processes import run_ranks
from tests.waiting import wait_for

Row = dict[str, Any]


def _calls(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """One call of each kind, and what came out."""
    with recorded_world(rank, world_size, folder) as recorder:
        values: dict[str, Any] = {"backend": dist.get_backend(), "type": type(dist.group.WORLD).__name__}
        mine = torch.full((2, 3), float(rank + 1))
        right, left = (rank + 1) % world_size, (rank - 1) % world_size

        reduced = mine.clone()
        dist.all_reduce(reduced)
        work = dist.all_reduce(mine.clone(), async_op=True)
        assert work is not None
        values["async"] = (work.wait(), work.is_completed(), work.is_success())
        values["future"] = dist.all_reduce(mine.clone(), async_op=True).get_future().wait()[0][0, 0].item()
        gathered = torch.zeros(2 * world_size, 3)
        dist.all_gather_into_tensor(gathered, mine)
        parts = [torch.zeros(2, 3) for _ in range(world_size)]
        dist.all_gather(parts, mine)
        scattered = torch.zeros(2, 3)
        dist.reduce_scatter_tensor(scattered, gathered)
        dist.reduce_scatter(torch.zeros(2, 3), parts)
        dist.broadcast(mine.clone(), src=1)
        dist.reduce(mine.clone(), dst=0)
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        dist.scatter(torch.zeros(2, 3), parts if rank == 0 else None, src=0)
        exchanged = torch.zeros(world_size)
        dist.all_to_all_single(exchanged, torch.arange(float(world_size)) + 10 * rank)
        dist.barrier()
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank})
        name = ["of rank 0" if rank == 0 else None]
        dist.broadcast_object_list(name, src=0)

        received = torch.zeros(2, 3)
        if rank % 2 == 0:
            dist.send(mine, right)
            dist.recv(received, left)
        else:
            dist.recv(received, left)
            dist.send(mine, right)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, received, left)])
        for one in works:
            one.wait()
        with dist._coalescing_manager(async_ops=True) as manager:
            several = [torch.ones(2), torch.ones(5)]
            for tensor in several:
                dist.all_reduce(tensor)
        manager.wait()

        # Handles that nobody waits for, and one that nobody keeps.
        dist.all_reduce(mine.clone(), async_op=True)
        dist.barrier()

        values |= {
            "reduced": reduced[0, 0].item(),
            "gathered": gathered[:, 0].tolist(),
            "scattered": scattered[0, 0].item(),
            "exchanged": exchanged.tolist(),
            "objects": [entry["rank"] for entry in objects],
            "name": name[0],
            "received": received[0, 0].item(),
            "coalesced": several[1][0].item(),
        }

        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for dim in ("dp", "tp"):
            dist.all_reduce(torch.ones(1), group=mesh.get_group(dim))
        again = dist.new_group([0, 1])
        twice = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=again)
            dist.all_reduce(torch.ones(1), group=twice)

        poisoned = torch.ones(4)
        if rank == 2:
            poisoned[3] = float("nan")
        dist.all_gather([torch.zeros(4) for _ in range(world_size)], poisoned)
        dist.all_to_all_single(torch.zeros(4), poisoned)
        dist.all_gather_into_tensor(torch.zeros(4 * world_size), poisoned)
        dist.all_reduce(poisoned)
        dist.all_reduce(torch.full((8,), 1e38))  # whose sum is Inf, while none of it is
        dist.all_reduce(torch.ones(3, dtype=torch.int64))
        values["leaks"] = _leaks(mine)
        values["fails open"] = _fails_open(mine)
    return values | {"rows": rows(recorder.directory, "collectives"), "folder": str(recorder.directory)}


def _leaks(like: torch.Tensor) -> dict[str, int]:
    """What is still there, without the garbage collector, after handles and tensors are dropped."""
    gc.collect()
    gc.disable()
    references = []
    for _ in range(3):
        tensor = like.clone()
        references.append(weakref.ref(tensor))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        del work, tensor
        tensor = like.clone()
        references.append(weakref.ref(tensor))
        future = dist.all_reduce(tensor, async_op=True).get_future()
        future.wait()
        del future, tensor
    # gloo's thread lets go a moment after it has woken the waiting one.
    wait_for(lambda: all(reference() is None for reference in references), "the end of the tensors")
    alive = sum(reference() is not None for reference in references)
    garbage = gc.collect()
    gc.enable()
    return {"tensors": alive, "garbage": garbage}


def _fails_open(like: torch.Tensor) -> tuple[float, int]:
    """A recording that raises: the call happens, once, and the error is counted."""
    os.environ["RANKSCOPE_FAIL_LOUD"] = "0"
    before = error_counts["collectives.issue"]
    tensor = like.clone()
    describe = Calls._describe
    Calls._describe = _raise  # type: ignore[method-assign,assignment]
    try:
        for calls in [value for value in gc.get_objects() if isinstance(value, Calls)]:
            calls._sites.clear()
        dist.all_reduce(tensor)
    finally:
        Calls._describe = describe  # type: ignore[method-assign]
        os.environ["RANKSCOPE_FAIL_LOUD"] = "1"
    return tensor[0, 0].item(), error_counts["collectives.issue"] - before


def _raise(*args: object) -> None:
    raise RuntimeError("broken on purpose")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_calls, world_size=4, args=(str(tmp_path_factory.mktemp("calls")),))


def test_calls_give_what_they_should(ranks: list[dict[str, Any]]) -> None:
    for rank, values in enumerate(ranks):
        assert values["backend"] == "gloo"
        assert values["type"] == "RecordedGroup"
        assert values["async"] == (True, True, True)
        assert values["future"] == values["reduced"] == 10
        assert values["gathered"] == [1, 1, 2, 2, 3, 3, 4, 4]
        assert values["scattered"] == 4 * (rank + 1)
        assert values["exchanged"] == [rank + 10 * other for other in range(4)]
        assert values["objects"] == [0, 1, 2, 3]
        assert values["name"] == "of rank 0"
        assert values["received"] == (rank - 1) % 4 + 1
        assert values["coalesced"] == 4


def test_every_call_is_recorded_and_complete(ranks: list[dict[str, Any]]) -> None:
    for values in ranks:
        ops = Counter(row["op"] for row in values["rows"])
        assert set(ops) == {
            "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
            "barrier", "send", "recv",
        }  # fmt: skip
        assert ops["send"] == ops["recv"] == 2
        unfinished = [row for row in values["rows"] if row["state"] != COMPLETE]
        assert unfinished == []
        for row in values["rows"]:
            assert row["end_ns"] >= row["issue_ns"]
            assert 0 <= row["wait_ns"] <= row["end_ns"] - row["issue_ns"] + 1_000_000
            assert Path(row["caller"].split(":")[0]).name in ("test_wrapped.py", "recorded_world.py"), row


def test_records_of_one_call_match_over_the_ranks(ranks: list[dict[str, Any]]) -> None:
    def key(row: Row) -> tuple[Any, ...]:
        shape = row["shape"] if row["op"] not in ("gather", "scatter") else ""
        return row["process_group"], row["seq"], row["op"], row["dtype"], shape, row["bytes"] if shape else 0

    def of_group(values: dict[str, Any], label: str) -> list[tuple[Any, ...]]:
        # An object's size may differ from rank to rank, and so may a handle's end: not its place in the sequence.
        return [key(row) for row in values["rows"] if row["process_group"] == label and row["peer"] is None]

    assert len({tuple(of_group(values, "world:0-3")) for values in ranks}) == 1
    for label, members in {"dp:0,2": (0, 2), "dp:1,3": (1, 3), "tp:0-1": (0, 1), "tp:2-3": (2, 3)}.items():
        for rank, values in enumerate(ranks):
            assert len(of_group(values, label)) == (rank in members)
    for label in ("group:0-1", "group:0-1#2"):
        assert [len(of_group(values, label)) for values in ranks] == [1, 1, 0, 0]


def test_groups_are_announced_with_their_members(ranks: list[dict[str, Any]]) -> None:
    lines = (Path(ranks[3]["folder"]) / "events.jsonl").read_text().splitlines()
    groups = [event for event in map(json.loads, lines) if event["kind"] == "process_group"]
    assert {group["process_group"]: group["members"] for group in groups} == {
        "world:0-3": [0, 1, 2, 3],
        "dp:1,3": [1, 3],
        "tp:2-3": [2, 3],
    }
    assert {group["description"] for group in groups} == {"default_pg", "mesh_dp", "mesh_tp"}


def test_point_to_point_names_the_peer(ranks: list[dict[str, Any]]) -> None:
    for rank, values in enumerate(ranks):
        for op, peer in (("send", (rank + 1) % 4), ("recv", (rank - 1) % 4)):
            found = [row for row in values["rows"] if row["op"] == op]
            assert [(row["peer"], row["seq"], row["is_async"]) for row in found] == [(peer, 0, 0), (peer, 1, 1)]


def test_a_nan_is_flagged_where_it_comes_from(ranks: list[dict[str, Any]]) -> None:
    """In what is reduced, and in what is gathered or exchanged; gathers of flat parameters are not looked at."""
    flagged = [
        (rank, row["op"], row["shape"]) for rank, one in enumerate(ranks) for row in one["rows"] if row["nonfinite"]
    ]
    assert flagged == [(2, op, "4") for op in ("all_gather", "all_to_all", "all_reduce")]
    integers = [row for row in ranks[0]["rows"] if row["op"] == "all_reduce" and row["dtype"] == "int64"]
    assert [row["nonfinite"] for row in integers] == [None]
    gathered = [row["nonfinite"] for row in ranks[2]["rows"] if row["op"] == "all_gather" and row["shape"] == "4"]
    assert gathered == [1, None]


def test_several_tensors_are_one_record(ranks: list[dict[str, Any]]) -> None:
    (row,) = [row for row in ranks[0]["rows"] if row["shape"] == "2 5"]
    assert row["bytes"] == 28


def test_nothing_outlives_the_call(ranks: list[dict[str, Any]]) -> None:
    for values in ranks:
        assert values["leaks"] == {"tensors": 0, "garbage": 0}


def test_an_error_in_the_wrapper_does_not_reach_the_call(ranks: list[dict[str, Any]]) -> None:
    for values in ranks:
        assert values["fails open"] == (10.0, 1)


# When a rank dies.


def _killed_inside(rank: int, world_size: int, folder: str) -> None:
    with recorded_world(rank, world_size, folder) as recorder:
        dist.barrier()

        def kill_in_call() -> None:
            wait_for(lambda: rows(recorder.directory, "collectives")[-1]["op"] == "all_reduce", "the call on the tape")
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 0:
            # It waits for rank 1, which never comes.
            threading.Thread(target=kill_in_call).start()
            dist.all_reduce(torch.ones(7))
        else:
            threading.Event().wait(60)


def _mismatch(rank: int, world_size: int, folder: str) -> None:
    with recorded_world(rank, world_size, folder, timeout_s=30):
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(100 + 1000 * rank))


@pytest.mark.parametrize(
    ("worker", "shapes"), [(_killed_inside, {0: "7"}), (_mismatch, {0: "100", 1: "1100"})], ids=["killed", "mismatch"]
)
def test_the_last_call_of_a_dead_rank_is_on_its_tape(tmp_path: Path, worker: Any, shapes: dict[int, str]) -> None:
    with pytest.raises(AssertionError, match="exit code"):
        run_ranks(worker, world_size=2, args=(str(tmp_path),))
    last = {rank: rows(tmp_path / f"rank-{rank}", "collectives")[-1] for rank in shapes}
    assert {rank: row["shape"] for rank, row in last.items()} == shapes
    assert any(row["state"] == OPEN and row["end_ns"] is None for row in last.values())
    assert all(row["op"] == "all_reduce" and row["seq"] == 1 for row in last.values())


# Switched off.


def test_disabled_probes_leave_torch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = c10d._new_process_group_helper
    monkeypatch.setenv("RANKSCOPE_DISABLED", "1")
    install(TapeRecorder(tmp_path, rank=0, attempt=0))
    assert c10d._new_process_group_helper is original
    monkeypatch.delenv("RANKSCOPE_DISABLED")
    install(NullRecorder())
    assert c10d._new_process_group_helper is original


def test_install_and_uninstall(tmp_path: Path) -> None:
    original = c10d._new_process_group_helper, c10d._register_pg_in_world
    install(TapeRecorder(tmp_path, rank=0, attempt=0))
    try:
        assert c10d.ProcessGroup is dist.ProcessGroup  # `batch_isend_irecv` compares types with it
        assert c10d._new_process_group_helper is not original[0]
    finally:
        uninstall()
    assert (c10d._new_process_group_helper, c10d._register_pg_in_world) == original
    assert collectives._probe is None


@pytest.mark.filterwarnings("ignore:.*reduce_scatter_tensor:FutureWarning")
def test_a_blocking_call_makes_torch_do_nothing_twice(tmp_path: Path) -> None:
    """gloo's reduce-scatter copies its output in `wait`, and did so again for a caller that waited after us."""
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = dist.new_group()
        install(recorder, check_nonfinite=False)  # which is work of our own
        recorded = dist.new_group()
        done = []
        for group in (plain, recorded):
            for _ in range(2):  # the first call looks for its caller
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(4), group=group)
            done.append(Counter(event.name for event in profile.events()))
        assert done[0] == done[1]
        assert done[0]["aten::copy_"] > 0
    finally:
        uninstall()
        dist.destroy_process_group()
        recorder.close()


def test_methods_that_torch_has_are_all_known() -> None:
    """A call that a new version of torch adds must be recorded or named here."""
    not_calls = {
        "abort", "bound_device_id", "boxed", "get_group_store", "group_desc", "group_name", "merge_remote_group",
        "name", "rank", "set_timeout", "shutdown", "size", "split_group", "unbox", "use_pg_for_symm_mem_rendezvous",
        "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL",
    }  # fmt: skip
    public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
    assert public - not_calls - set(METHODS) == set()
