from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from probes.collectives.nccl_plugin.build import BuildError, compile_plugin
from tests.support.played.nccl_interface import PlayedNccl


@pytest.fixture(scope="session")
def plugin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "libnccl-profiler-rankscope.so"
    try:
        compile_plugin(path, flags=["-Werror"])
    except BuildError as error:
        if "no C compiler" in str(error):
            pytest.skip(str(error))
        raise
    return path


@pytest.fixture
def play(plugin_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlayedNccl]:
    """A plugin of its own for the test: a copy of the library has its own state. It records in tmp_path/tape."""

    def start(version: int, *, events: str = "") -> PlayedNccl:
        directory = tmp_path / "tape"
        directory.mkdir(exist_ok=True)
        copy = tmp_path / f"plugin-{version}.so"
        shutil.copy(plugin_library, copy)
        monkeypatch.setenv("RANKSCOPE_NCCL_DIR", str(directory))
        monkeypatch.setenv("RANKSCOPE_NCCL_RANK", "3")
        monkeypatch.setenv("RANKSCOPE_NCCL_ATTEMPT", "1")
        monkeypatch.setenv("RANKSCOPE_NCCL_EVENTS", events)
        return PlayedNccl(copy, version)

    return start
