"""Variables of the environment that a run records: those that choose how ranks communicate, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankscope
from probes.tape.run_facts import settings
from tests.factories import make_run


def test_settings_are_those_of_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128", "NCCL_MAX_NCHANNELS": "16", "CUDA_VISIBLE_DEVICES": "3",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/runs/a/dumps", "NCCL_API_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz0123456789",
        "HOME_OF_A_TEAM": "x",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = settings()
    assert {name: found[name] for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS")} == {
        "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128", "NCCL_MAX_NCHANNELS": "16",
    }  # fmt: skip
    assert not found.keys() & {"CUDA_VISIBLE_DEVICES", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "HOME_OF_A_TEAM"}
    assert "abcdefghijkl" not in str(found)


def test_a_comparison_names_a_variable_that_differs(tmp_path: Path) -> None:
    ring, tree = make_run(tmp_path / "a", steps=40), make_run(tmp_path / "b", steps=40)
    for run, algorithm in ((ring, "Ring"), (tree, "Tree")):
        run.add_to_manifest({"environment": {"NCCL_ALGO": algorithm, "NCCL_DEBUG": "WARN"}})
    compared = rankscope.open_run(ring.path).compare(rankscope.open_run(tree.path))
    assert ("environment.NCCL_ALGO", "Ring", "Tree") in compared.versions
    assert not any("NCCL_DEBUG" in name for name, _, _ in compared.versions)
