"""Paths that a later launch prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.tape import typed_path
from probes.tape.typed_path import analyze_command, as_typed
from trainer.config.config import Config
from trainer.config.launch_folder import enter_launch_folder


def test_a_path_is_printed_as_it_is_typed_where_the_command_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed_path, "_started_in", [])
    first, here = tmp_path / "first", tmp_path / "here"
    for folder in (first, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    assert as_typed(here / "runs" / "demo") == "runs/demo"
    assert as_typed(first / "runs" / "demo") == str(first / "runs" / "demo")
    enter_launch_folder(Config.model_validate({"data": {"path": ["a.txt"]}}), {"cwd": str(first)})
    assert Path.cwd() == first
    assert analyze_command(here / "my runs" / "demo") == "rankscope analyze 'my runs/demo'"
    assert as_typed(here / "runs" / "demo") == "runs/demo"
