"""Groups that torchft's wrappers hold: a wrapper of the same shape over real groups; torchft itself is run in
tests/trials/e2e/test_frameworks_run.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from probes.collectives.torchft_groups import TorchftGroups
from probes.collectives.wrapped import RecordedGroup, install, uninstall
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from store import Store


class ProcessGroupWrapper(dist.ProcessGroup):
    """Holds the group in use, as torchft's does."""

    def __init__(self, global_ranks: list[int] | None) -> None:
        super().__init__(0, 1)
        self._pg: dist.ProcessGroup | None = None
        self._global_ranks = global_ranks
        self._uuid = 0x12345


class Gloo(ProcessGroupWrapper):
    def _create_pg(self) -> dist.ProcessGroup:
        store = dist.HashStore()
        group = dist.ProcessGroup(store, 0, 1)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, 0, 1)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def configure(self) -> None:
        self._pg = self._create_pg()


CREATE = Gloo._create_pg


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TapeRecorder]:
    module = ModuleType("torchft.process_group")
    module.ProcessGroupWrapper = ProcessGroupWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchft.process_group", module)
    run, _ = RunDir.adopt(tmp_path / "run")
    recorder = TapeRecorder(run.rank_dir(0, 0), rank=0, attempt=0)
    install(recorder)
    yield recorder
    uninstall()
    recorder.close()


def reduce(wrapper: Gloo) -> None:
    assert wrapper._pg is not None
    wrapper._pg.allreduce([torch.ones(3)], dist.AllreduceOptions()).wait()


def test_what_a_wrapper_holds_and_will_hold_is_recorded(tmp_path: Path, recorder: TapeRecorder) -> None:
    wrapper = Gloo([0])
    wrapper.configure()
    plain = wrapper._pg
    groups = TorchftGroups(rank=0, world_size=1)
    groups.record()
    assert type(wrapper._pg) is RecordedGroup
    assert wrapper._pg.plain is plain
    with recorder.step(1):
        reduce(wrapper)
        wrapper.configure()  # the next quorum
        assert type(wrapper._pg) is RecordedGroup
        reduce(wrapper)
    groups.release()
    assert type(wrapper._pg) is dist.ProcessGroup
    assert Gloo._create_pg is CREATE
    uninstall()
    recorder.close()
    with Store.open(RunDir(tmp_path / "run")) as store:
        found = store.rows("SELECT op, bytes, process_group, end_ns IS NOT NULL FROM collectives ORDER BY issue_ns")
    assert found == [("all_reduce", 12, "torchft_2345:0", True), ("all_reduce", 12, "torchft_2345:0#2", True)]


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("members", [None, [1], [0, 1], [0, 0]])
def test_groups_whose_ranks_are_not_those_of_this_run_stay_as_they_are(members: list[int] | None) -> None:
    wrapper = Gloo(members)
    wrapper.configure()
    plain = wrapper._pg
    groups = TorchftGroups(rank=0, world_size=1)
    groups.record()
    assert wrapper._pg is plain
    groups.release()


def test_without_torchft_there_is_nothing_to_record() -> None:
    groups = TorchftGroups(rank=0, world_size=1)
    groups.record()
    groups.release()
