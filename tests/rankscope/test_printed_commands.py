"""Commands that are printed for copying: a path in them is quoted for the shell."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from probes.tape.rundir import RunDir
from rankscope.cli import app
from store import Ingester
from tests.factories import make_run
from trainer.launcher.node import Outcome
from trainer.launcher.supervise import _print_outcome

ROOT = Path(__file__).parents[2]
PACKAGES = ("rankscope", "probes", "store", "analyzers", "watch", "trainer", "dashboard")
_COMMANDS = "rankscope (analyze|top|dashboard|train --resume)|tensorboard --logdir|wandb sync"
_BEFORE_A_PATH = re.compile(rf"({_COMMANDS}|--set data\.path=) ?$")


def _unquoted(path: Path) -> Iterator[str]:
    """Values that an f-string of the module puts after a command, without `shlex.quote` or a name for its result."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value in zip(node.values, node.values[1:], strict=False):
            is_path = isinstance(before, ast.Constant) and _BEFORE_A_PATH.search(str(before.value))
            source = ast.unparse(value)
            if is_path and "shlex.quote(" not in source and source != "{quoted}":
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {source}"


def test_every_path_after_a_printed_command_is_quoted() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert not [place for path in modules for place in _unquoted(path)]


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_run_in_a_folder_with_a_space_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    written = io.StringIO()
    run = RunDir(tmp_path / "my [b]runs" / "demo-1")
    outcome = Outcome(reason={0: "finished", 1: "failed", 130: "interrupted"}[code], exit_code=code, message="Why.")
    _print_outcome(run, outcome, Console(file=written, width=40))
    (command,) = re.findall(r"rankscope (?:analyze|train --resume) (.*?/demo-1'?)", written.getvalue())
    assert shlex.split(command) == ["my [b]runs/demo-1"]


def test_a_prepared_folder_is_counted_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("text\n")
    done = CliRunner().invoke(app, ["prepare", "one.txt", "--tokenizer", "bytes", "--out", "my data"])
    assert done.exit_code == 0, done.output
    assert " of 1 document in 1 shard\n" in done.output
    assert "--set data.path='my data' --set model.vocab_size=256" in done.output


def test_a_second_watch_says_that_the_run_has_one(tmp_path: Path) -> None:
    """It advised to stop the watch that `train` had started."""
    run = make_run(tmp_path / "my runs", ranks=1, steps=3)
    command = [sys.executable, "-m", "rankscope", "watch", str(run.path)]
    with Ingester(run):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"rankscope watch: {run.path} is watched by process {os.getpid()}, as `train` and `run` start a watch: "
        f"`rankscope top '{run.path}'` shows the ranks\n"
    )


def test_watch_of_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    """It returned without a line."""
    run = make_run(tmp_path / "my runs", ranks=2, steps=10)
    command = [sys.executable, "-m", "rankscope", "watch", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{run.path} has ended. Next: rankscope analyze '{run.path}'\n"
