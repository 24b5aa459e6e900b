"""A rank says which GPU it has, by the name under which the GPU's readings are kept."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from probes.tape.events import read_events
from probes.tape_recorder import TapeRecorder, device_uuid, nvml_name
from watch.health.nvml import Nvml


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (uuid.UUID(int=0x1B7D), "GPU-00000000-0000-0000-0000-000000001b7d"),  # as CUDA has it: no prefix
        ("GPU-1b7d", "GPU-1b7d"),
        ("MIG-1b7d", "MIG-1b7d"),
        (None, ""),  # a torch that does not tell
    ],
)
def test_cudas_uuid_as_nvml_writes_it(given: object, name: str) -> None:
    assert nvml_name(given) == name


def test_a_slice_of_a_gpu_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid=uuid.UUID(int=7), name="NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_uuid("cuda:0") == f"MIG-{uuid.UUID(int=7)}"


def test_a_cpu_has_none(tmp_path: Path) -> None:
    assert device_uuid("cpu") == ""
    TapeRecorder(tmp_path, rank=0, attempt=0, world_size=1, device="cpu").close()
    assert "device_uuid" not in read_events(tmp_path / "events.jsonl")[0][0]


@pytest.mark.gpu
def test_a_rank_and_its_readings_have_the_same_name(tmp_path: Path) -> None:
    TapeRecorder(tmp_path, rank=0, attempt=0, world_size=1, device="cuda:0").close()
    assert read_events(tmp_path / "events.jsonl")[0][0]["device_uuid"] in {read.device for read in Nvml().read()}
