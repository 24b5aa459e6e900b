"""A secret in every place where a user may put one: afterwards it stands in `secrets.json` and nowhere else."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from probes.tape.rundir import SECRETS, RunDir
from rankscope.cli import app
from tests.e2e.launched import TINY
from tests.forked import run_python

SECRET = "Zq7rankscopeSecretZq7"
ENVIRONMENT = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {SECRET}",
    "WANDB_API_KEY": SECRET,
    "HF_TOKEN": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "RANKSCOPE_JOB_SECRET": SECRET,
    "NCCL_MY_TOKEN": SECRET,
}
SCRIPT = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--api-key")
parser.add_argument("--db_password")
parser.add_argument("url")
parser.parse_args()
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(12):
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ours and an attached one, both started with the secret; what they printed is beside them."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "text.txt").write_text("import this\n" * 2_000)
    (folder / "my.toml").write_text(
        f'[alerts]\nwebhook = "http://127.0.0.1:9/services/{SECRET}?token={SECRET}"\nmin_severity = "info"\n'
    )
    settings = (*TINY, "train.steps=12", "data.path=['text.txt']", "parallel.dp_shard=1", "trackers.to=tensorboard")
    settings = (*settings, f"alerts.command=false --token {SECRET}")
    options = [part for setting in settings for part in ("--set", setting)]
    environment = {**os.environ, **ENVIRONMENT}
    (folder / "train.py").write_text(SCRIPT)
    script = ["--api-key", SECRET, f"--db_password={SECRET}", f"https://me:{SECRET}@example.org/data"]
    for name, words in (
        ("train", ["train", "my.toml", *options, "--fault", "nan_grad@step=6,rank=0"]),
        ("run", ["run", "train.py", *script]),
    ):
        done = run_python(["-m", "rankscope", *words], cwd=folder, env=environment, timeout_s=200, forks_python=True)
        (folder / f"{name}.printed").write_text(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr[-2000:]
    return folder


def hits(folder: Path) -> list[str]:
    """Files below a folder that hold the secret, in archives too."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # the log of a store that was closed meanwhile
            continue
        if SECRET.encode() in content:
            found.append(str(path.relative_to(folder)))
        elif path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    if file is not None and SECRET.encode() in file.read():
                        found.append(f"{path.name}:{member.name}")
    return found


def test_the_secret_stands_in_the_private_file_alone(runs: Path) -> None:
    found = [RunDir(path.parent) for path in (runs / "runs").glob("*/run.json") if not path.parent.is_symlink()]
    ours = next(run for run in found if is_ours(run.path))
    assert len(found) == 2
    assert hits(runs) == sorted(["my.toml", str((ours.path / SECRETS).relative_to(runs))])
    assert (ours.path / SECRETS).stat().st_mode & 0o777 == 0o600
    assert SECRET in ours.private_manifest()["config"]["alerts"]["webhook"], "what acts on it still has it"
    events = (ours.node_dir(0) / "events.jsonl").read_text()
    assert '"hook_failed"' in events, "both receivers were tried, and their failures name no secret"


def is_ours(run: Path) -> bool:
    return RunDir(run).manifest().get("attached") is not True


@pytest.mark.parametrize("is_attached", [False, True])
def test_no_command_gives_it_away(
    runs: Path, tmp_path: Path, is_attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [path.parent for path in (runs / "runs").glob("*/run.json") if not path.parent.is_symlink()]
    run, other = [str(path) for path in sorted(paths, key=lambda path: is_ours(path) is is_attached)]
    monkeypatch.chdir(tmp_path)
    commands = [
        ["analyze", run, "--format", "json"], ["report", run, "--html", "report.html", "--markdown", "report.md"],
        ["share", run, "--out", "shared.tar.gz"],
    ]  # fmt: skip
    if not is_attached:
        commands += [
            ["analyze", run], ["compare", run, other, "--format", "json"],
            ["sql", run, "FROM events", "--format", "csv"],
            ["export", run, "--to", "chrome-trace", "--out", "trace.json"],
            ["export", run, "--to", "parquet", "--out", "parquet"],
            ["export", run, "--to", "tensorboard", "--out", "tensorboard"],
            ["collect", run, "--into", "collected"], ["fleet", str(runs / "runs")], ["top", run, "--once"],
        ]  # fmt: skip
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code in (0, 1), (words, done.output)
        (tmp_path / "printed").write_text(done.output)
        assert hits(tmp_path) == [], words
