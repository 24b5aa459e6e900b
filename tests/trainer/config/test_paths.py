"""Paths that are not there are told by the launcher, with exit code 2 and before the run has a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.cli import app
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.config.machine import check_machine
from trainer.config.paths import check_paths


@pytest.mark.parametrize(
    ("override", "setting"),
    [('data.path=["missing.txt"]', "data.path"), ('data.validation={web="missing"}', "data.validation.web"),
     ("model.weights=missing.safetensors", "model.weights"), ("train.backend=nccl", "train.backend"),
     ("alerts.command=./missing.sh x", "alerts.command")],
)  # fmt: skip
def test_a_launch_ends_before_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--set", override, "--set", "train.device=cpu", "--nproc-per-node", "1"]
    done = CliRunner().invoke(app, ["train", "debug", *options])
    assert done.exit_code == 2, done.output
    assert setting in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_relative_paths_begin_at_the_first_launch(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    config = Config.model_validate({"data": {"path": ["text"]}})
    check_paths(config, base=tmp_path)
    with pytest.raises(ConfigError, match=r"data.path = 'text': no such file"):
        check_paths(config, base=tmp_path / "text")


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("publish", {"address": "file://{}"}),
        ("checkpoint", {"remote": "file://{}/copies"}),
        ("trackers", {"to": ["tensorboard"], "tensorboard_dir": "{}"}),
    ],
)
def test_nothing_can_be_written_below_a_file(tmp_path: Path, section: str, values: dict[str, object]) -> None:
    (tmp_path / "file").touch()

    def below(place: Path) -> Config:
        given = {key: value.format(place) if isinstance(value, str) else value for key, value in values.items()}
        return Config.model_validate({section: given})

    check_paths(below(tmp_path / "new"), base=tmp_path)
    with pytest.raises(ConfigError, match=r"file is not a folder"):
        check_paths(below(tmp_path / "file"), base=tmp_path)


def test_a_program_for_findings_is_there(tmp_path: Path) -> None:
    config = Config.model_validate({"alerts": {"command": "./notify --quietly"}})
    program = tmp_path / "notify"
    program.touch(mode=0o600)
    with pytest.raises(ConfigError, match=r"alerts.command = \(redacted\)"):
        check_paths(config, base=tmp_path)
    program.chmod(0o700)
    check_paths(config, base=tmp_path)
    check_paths(Config.model_validate({"alerts": {"command": "cat"}}), base=tmp_path)


def test_nccl_needs_a_gpu() -> None:
    config = Config.model_validate({"train": {"backend": "nccl"}})
    check_machine(config, has_gpu=True)
    with pytest.raises(ConfigError, match=r"train.backend = 'nccl': needs a GPU"):
        check_machine(config, has_gpu=False)
