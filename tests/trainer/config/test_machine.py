"""Settings that a machine cannot carry out are refused before a folder is made."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.config.machine import check_machine, check_ranks_here, may_have_gpu
from trainer.launcher.start import Options, launch_run


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.async_tp=true", "parallel.tp=2", "train.device=cpu"], "parallel.async_tp = true: needs"),
        (
            ["parallel.cpu_offload=optimizer", "parallel.dp_shard=-1", "train.device=cpu"],
            "parallel.cpu_offload = 'optimizer': needs",
        ),
        (["train.float8=tensorwise", "train.device=cpu"], "train.float8 = 'tensorwise': "),
    ],
)
def test_the_launcher_refuses_and_makes_nothing(tmp_path: Path, overrides: list[str], words: str) -> None:
    options = Options(overrides=[*overrides, f"run.dir={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match=words):
        launch_run(options, version="0", console=Console(file=io.StringIO()))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("package", ["safetensors", "fsspec"])
def test_a_missing_package_is_named_before_a_run_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    options = Options(overrides=[f"run.dir={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'rankscope\[train\]'"):
        launch_run(options, version="0", console=Console(file=io.StringIO()))
    assert not [*tmp_path.iterdir()]


def test_what_needs_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for values in ({"train": {"device": "cuda"}}, {"parallel": {"cpu_offload": "all", "dp_shard": -1}}):
        config = Config.model_validate(values)
        check_machine(config, has_gpu=True)
        with pytest.raises(ConfigError, match=r"CUDA|cuda"):
            check_machine(config, has_gpu=False)
    monkeypatch.setitem(sys.modules, "torchao", None)  # as if it were not installed
    emulated = Config.model_validate({"train": {"float8": "tensorwise", "float8_emulated": True}})
    with pytest.raises(ConfigError, match="pip install"):
        check_machine(emulated, has_gpu=True)


@pytest.mark.parametrize("name", ["nvidia0", "nvidia12", "kfd", "dxg"])
def test_a_device_file_may_be_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert not may_have_gpu(tmp_path)
    (tmp_path / name).touch()
    assert may_have_gpu(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not may_have_gpu(tmp_path), "they are hidden"


def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    on_cuda, on_either = (Config.model_validate({"train": {"device": name}}) for name in ("cuda", "auto"))
    (tmp_path / "nvidia0").touch()
    check_ranks_here(on_cuda, 4, tmp_path)
    (tmp_path / "nvidia1").touch()
    check_ranks_here(on_cuda, 2, tmp_path)
    check_ranks_here(on_either, 4, tmp_path)
    with pytest.raises(ConfigError, match="4 ranks: only 2 GPUs"):
        check_ranks_here(on_cuda, 4, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    check_ranks_here(on_cuda, 4, tmp_path)


def test_every_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"^training needs torch, fsspec: pip install 'rankscope\[train\]'$"):
        check_machine(Config(), has_gpu=False)
