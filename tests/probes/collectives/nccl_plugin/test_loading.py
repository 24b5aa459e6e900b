"""When NCCL is told to load the plugin, when not, and what is said then."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from probes.collectives.nccl_plugin import loading as module
from probes.collectives.nccl_plugin.build import BuildError, library
from probes.collectives.nccl_plugin.loading import gpu_is_present, load_plugin, record_nccl
from probes.tape.events import read_events
from probes.tape_recorder import TapeRecorder

VARIABLES = (
    "NCCL_PROFILER_PLUGIN",
    "RANKSCOPE_NCCL_DIR",
    "RANKSCOPE_NCCL_RANK",
    "RANKSCOPE_NCCL_ATTEMPT",
    "RANKSCOPE_NCCL_EVENTS",
    "RANKSCOPE_NCCL_PLUGIN",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored, whatever the code sets
        monkeypatch.delenv(name)


@pytest.fixture
def built(plugin_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "library", lambda: plugin_library)
    return plugin_library


def test_variables_are_set_for_the_rank(built: Path, tmp_path: Path) -> None:
    loading = load_plugin(tmp_path, rank=3, attempt=2, has_gpu=True)
    assert loading.is_set
    assert os.environ["NCCL_PROFILER_PLUGIN"] == str(built)
    assert os.environ["RANKSCOPE_NCCL_DIR"] == str(tmp_path)
    assert (os.environ["RANKSCOPE_NCCL_RANK"], os.environ["RANKSCOPE_NCCL_ATTEMPT"]) == ("3", "2")
    # The next attempt of the same process, or a rank whose launcher has set the variable: it is ours.
    assert load_plugin(tmp_path, rank=3, attempt=3, has_gpu=True).is_set


def test_the_plugin_is_not_loaded_without_a_gpu(built: Path, tmp_path: Path) -> None:
    loading = load_plugin(tmp_path, rank=0, attempt=0, has_gpu=False)
    assert loading.state == "no_gpu"
    assert not loading.should_log
    assert "NCCL_PROFILER_PLUGIN" not in os.environ


def test_a_hidden_gpu_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert gpu_is_present()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not gpu_is_present()


def test_another_nccl_plugin_is_left_alone(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "/opt/nccl/libnccl-profiler-inspector.so")
    loading = load_plugin(tmp_path, rank=0, attempt=0, has_gpu=True)
    assert loading.state == "other_plugin"
    assert "inspector" in loading.reason
    assert loading.should_log
    assert os.environ["NCCL_PROFILER_PLUGIN"].endswith("inspector.so")


@pytest.mark.parametrize(("version", "state"), [((2, 22, 3), "old_nccl"), ((2, 23, 4), "set"), ((2, 29, 0), "set")])
def test_nccl_that_is_too_old(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], state: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    loading = load_plugin(tmp_path, rank=0, attempt=0, has_gpu=True)
    assert loading.state == state
    assert ("2.22.3" in loading.reason) == (state == "old_nccl")


@pytest.mark.parametrize(("initialized", "state"), [(True, "too_late"), (False, "set")])
def test_communicator_that_exists_already(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initialized: bool, state: str
) -> None:
    class Backend:
        def name(self) -> str:
            return "nccl"

        def _is_initialized(self) -> bool:
            return initialized

    class Group:
        _device_types = (torch.device("cuda"),)

        def _get_backend(self, device: Any) -> Backend:
            return Backend()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setitem(dist.distributed_c10d._world.pg_map, Group(), ("nccl", None))  # type: ignore[misc]
    loading = load_plugin(tmp_path, rank=0, attempt=0, has_gpu=True)
    assert loading.state == state
    assert ("attach before" in loading.reason) == initialized


def test_turned_off(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_NCCL_EVENTS", "none")
    loading = load_plugin(tmp_path, rank=0, attempt=0, has_gpu=True)
    assert loading.state == "off"
    assert not loading.should_log


def test_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BuildError, match="no C compiler"):
        library()
    loading = load_plugin(tmp_path, rank=0, attempt=0, has_gpu=True)
    assert loading.state == "not_built"
    assert "no C compiler" in loading.reason


def test_path_longer_than_nccl_takes(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "library", lambda: Path("/" + "x" * 260 + "/plugin.so"))
    assert load_plugin(tmp_path, rank=0, attempt=0, has_gpu=True).state == "not_built"


def test_library_is_built_once_and_kept(plugin_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = library()
    assert path.parent == tmp_path / "rankscope"
    before = path.stat().st_mtime_ns
    assert library() == path
    assert path.stat().st_mtime_ns == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.setenv("RANKSCOPE_NCCL_PLUGIN", str(plugin_library))
    assert library() == plugin_library
    monkeypatch.setenv("RANKSCOPE_NCCL_PLUGIN", "/nowhere.so")
    with pytest.raises(BuildError, match=r"/nowhere\.so"):
        library()


def test_library_that_others_can_write_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = library()
    path.parent.chmod(0o777)
    with pytest.raises(BuildError, match="can be written by others"):
        library()
    path.parent.chmod(0o755)
    path.chmod(0o775)
    with pytest.raises(BuildError, match="can be written by others"):
        library()


def test_rank_says_why_it_does_not_record(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "gpu_is_present", lambda: True)
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "other")
    recorder = TapeRecorder(tmp_path, rank=1, attempt=0)
    with caplog.at_level(logging.WARNING):
        record_nccl(recorder, log_status=False)
        assert not caplog.records
        record_nccl(recorder, log_status=True)
    recorder.close()
    [record] = caplog.records
    assert "NCCL_PROFILER_PLUGIN names another plugin, other" in record.getMessage()
    events = [event for event in read_events(tmp_path / "events.jsonl")[0] if event["kind"] == "nccl_plugin"]
    assert [event["state"] for event in events] == ["other_plugin"] * 2


def test_loading_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from rankscope.probes.collectives.nccl_plugin.loading import load_plugin;"
        f" load_plugin(Path({str(tmp_path)!r}), rank=0, attempt=0, has_gpu=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
