"""What an attached run with bounded records says at its start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from probes.attach.attach import attach, detach
from probes.attach.launch.announcement import VARIABLE as ANNOUNCED_IN
from probes.attach.retention_line import retention_line
from tests.forked import run_python

WINDOW = {"retain": "window", "retain_s": 120.0, "budget_mb": 4.0}
LINE = "records: tapes and single calls of the last 120 s, at most 4 MB per rank and hour"


@pytest.fixture(autouse=True)
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A launcher that would keep the watch, so that none is started here."""
    monkeypatch.setenv(ANNOUNCED_IN, str(tmp_path / "announcement.json"))
    yield
    detach()


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, ""),
        ({"probes": {"retain": "all"}}, ""),
        ({"probes": {"retain": "window"}}, "records: tapes and single calls of the last 3600 s"),
        ({"probes": WINDOW}, LINE),
    ],
)
def test_the_line_states_window_and_budget(config: Mapping[str, Any], line: str) -> None:
    assert retention_line(config) == line


def test_attach_prints_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attach(run_dir=tmp_path / "run", config={"probes": WINDOW})
    assert capsys.readouterr().err.splitlines() == [f"rankscope: {LINE}"]


@pytest.mark.parametrize(
    ("variable", "config", "watch"),
    [
        ("RANK", {"probes": WINDOW}, True),
        ("TORCHELASTIC_RESTART_COUNT", {"probes": WINDOW}, True),
        ("", {"probes": WINDOW}, False),  # nobody would remove a record
        ("", {}, True),
    ],
)
def test_other_ranks_later_attempts_and_runs_that_keep_everything_print_no_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    config: Mapping[str, Any],
    watch: bool,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    if variable:
        monkeypatch.setenv(variable, "1")
    attached = attach(run_dir=tmp_path / "run", config=config, watch=watch)
    assert attached.run_dir is not None
    assert capsys.readouterr().err == ""


@pytest.mark.e2e
@pytest.mark.slow
def test_a_launched_program_says_it_once(tmp_path: Path) -> None:
    settings = [word for name, value in WINDOW.items() for word in ("--set", f"probes.{name}={value}")]
    command = ["-m", "rankscope", "run", *settings, "--nproc-per-node", "2", "--no-python", "/bin/true"]
    done = run_python(command, cwd=tmp_path, forks_python=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"rankscope: {LINE}\n") == 1
