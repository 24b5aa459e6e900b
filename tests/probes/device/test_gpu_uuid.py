"""A rank says which GPU it has, by the name under which the GPU's readings are kept."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from probes.attach.attach import detach
from probes.attach.auto_attach import auto_attach
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
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


def test_a_cpu_has_no_uuid(tmp_path: Path) -> None:
    assert device_uuid("cpu") == ""
    TapeRecorder(tmp_path, rank=0, attempt=0, world_size=1, device="cpu").close()
    assert "device_uuid" not in read_events(tmp_path / "events.jsonl")[0][0]


@pytest.mark.gpu
def test_a_rank_and_its_readings_have_the_same_name(tmp_path: Path) -> None:
    TapeRecorder(tmp_path, rank=0, attempt=0, world_size=1, device="cuda:0").close()
    assert read_events(tmp_path / "events.jsonl")[0][0]["device_uuid"] in {read.device for read in Nvml().read()}


@pytest.mark.parametrize("current", [0, 3])
def test_cuda_is_left_alone_until_the_program_initialises_it(
    current: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may still choose its devices by CUDA_VISIBLE_DEVICES, and use CUDA in processes that it forks."""

    def touches(*_: object) -> None:
        raise AssertionError("touches the driver")

    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name in ("is_available", "current_device", "get_device_name", "get_device_properties", "init"):
        monkeypatch.setattr(torch.cuda, name, touches)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    attached = auto_attach(run_dir=tmp_path / "run", watch=False)
    recorder = attached.recorder
    assert isinstance(recorder, TapeRecorder)
    recorder.identify_device()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    recorder.identify_device()
    recorder.identify_device()
    detach()
    (path,) = (tmp_path / "run").rglob("tapes/**/events.jsonl")
    ranks = [(one.get("device"), one.get("device_uuid")) for one in read_events(path)[0] if one["kind"] == "rank"]
    device = "cuda:3" if current else "cuda:1"
    assert ranks == [("cuda:1", None), (device, f"GPU-{device}")]
    assert RunDir(tmp_path / "run").manifest()["device_name"] == "NVIDIA H100"
