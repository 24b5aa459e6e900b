"""A rank's place in the mesh of a loop of the user's own, described or derived."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from probes.attach.launch import mesh

RANK = 5


class Recorder:
    """Keeps what is described."""

    rank = RANK

    def __init__(self) -> None:
        self.place: dict[str, Any] = {}

    def describe(self, **place: Any) -> None:
        self.place |= place


@pytest.fixture
def recorder() -> Any:
    return Recorder()


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=8)
    yield
    dist.destroy_process_group()


def test_sizes_by_name_are_a_mesh_whose_last_dimension_is_fastest(recorder: Any) -> None:
    assert mesh.describe(recorder, {"pp": 2, "dp": 2, "tensor": 2}) == {"pp": 1, "dp_replicate": 0, "tp": 1}
    assert recorder.place == {"pp": 1, "dp_replicate": 0, "tp": 1}


@pytest.mark.parametrize("sizes", [{"pp": 2, "tp": 2}, {"banana": 8}, {}])
def test_a_mesh_that_does_not_fit_records_nothing(recorder: Any, sizes: dict[str, int]) -> None:
    assert mesh.describe(recorder, sizes) == {}
    assert recorder.place == {}


@pytest.mark.usefixtures("eight_ranks")
def test_a_device_mesh_is_taken_as_it_is_and_its_groups_show_it(recorder: Any) -> None:
    assert mesh.derive(recorder) == {}
    made = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "fsdp"))
    assert mesh.describe(recorder, made) == {"pp": 1, "dp_shard": 1}
    assert mesh.derive(recorder) == {"pp": 1, "dp_shard": 1}


@pytest.mark.usefixtures("eight_ranks")
def test_a_mesh_of_one_dimension_uses_the_world_group(recorder: Any) -> None:
    unnamed = init_device_mesh("cpu", (8,))
    assert mesh.derive(recorder) == {}
    named = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    assert mesh.derive(recorder) == {"dp_shard": RANK}
    del unnamed, named


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("unflattens", [False, True], ids=["at once", "as torchtitan"])
def test_dimensions_of_size_one_do_not_hide_the_dimension_of_all_ranks(recorder: Any, unflattens: bool) -> None:
    names, sizes = ("pp", "dp_replicate", "fsdp", "tp"), (1, 1, 8, 1)
    if unflattens:
        off = {name: "fake" for name, size in zip(names, sizes, strict=True) if size == 1}
        world: Any = init_device_mesh("cpu", (8,), mesh_dim_names=("world",))
        made = world._unflatten(0, sizes, names, backend_override=off)
    else:
        made = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    assert mesh.derive(recorder) == {"dp_shard": RANK}
    del made


@pytest.mark.usefixtures("eight_ranks")
def test_groups_of_megatron_give_the_place_of_a_rank(recorder: Any) -> None:
    for ranks, name in (([4, 5], "TENSOR_MODEL_PARALLEL_GROUP"), ([1, 5], "DATA_PARALLEL_GROUP"), ([4, 5], "OTHER")):
        dist.new_group(ranks, group_desc=name)
    assert mesh.derive(recorder) == {"tp": 1, "dp_replicate": 1}


@pytest.mark.usefixtures("eight_ranks")
def test_a_stage_of_torch_pipelining_gives_the_place_of_a_rank(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stage:
        group_rank, group_size = 3, 4

    module = ModuleType("stage")
    module._PipelineStageBase = Stage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.pipelining.stage", module)
    stage = Stage()
    assert mesh.derive(recorder) == {"pp": 3}
    del stage


@pytest.mark.usefixtures("eight_ranks")
@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_a_dp_dimension_over_which_parameters_are_sharded_is_dp_shard(recorder: Any, shape: tuple[int, ...]) -> None:
    """`fully_shard` on a mesh that its user calls dp."""
    made = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    at, rest = made.get_local_rank("dp"), [Replicate()] * (len(shape) - 1)
    copied = torch.nn.Parameter(DTensor.from_local(torch.ones(4), made, [Replicate(), *rest], run_check=False))
    assert mesh.derive(recorder)["dp_replicate"] == mesh.describe(recorder, made)["dp_replicate"] == at
    sharded = torch.nn.Parameter(DTensor.from_local(torch.ones(4), made, [Shard(0), *rest], run_check=False))
    for place in (mesh.derive(recorder), mesh.describe(recorder, made)):
        assert (place["dp_shard"], place.get("dp_replicate")) == (at, None)
    del copied, sharded
