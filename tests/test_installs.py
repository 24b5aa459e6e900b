"""`rankscope run` in each way of installing Rankscope, beside a user's modules with the names of our packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.depth import usually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parent.parent
PACKAGES = ("probes", "store", "analyzers", "watch", "trainer", "dashboard")

TRAIN = """
import os, pathlib, sys

import torch
import torch.distributed as dist

import probes, store, trainer, watch

assert (probes.MINE, store.MINE, trainer.MINE, watch.MINE) == (1, 2, 3, 4)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
import rankscope

pathlib.Path(f"rankscope-of-{dist.get_rank()}").write_text(os.path.realpath(rankscope.__file__))
dist.destroy_process_group()
"""

USERS_FILES = {
    "train.py": TRAIN,
    "probes.py": "MINE = 1\n",
    "store/__init__.py": "MINE = 2\n",
    "trainer.py": "MINE = 3\n",
    "watch.py": "MINE = 4\n",
}


def build(folder: Path, hook: str, out: Path) -> Path:
    """Build with hatchling in `folder`, as `pip` and `python -m build` call it; returns what came out."""
    code = f"import hatchling.build, sys; print(hatchling.build.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


def environment_of(folder: Path, wheel: Path) -> Path:
    """The interpreter of an environment with `wheel`; its dependencies are those of the tests' environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=100)
    (site,) = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A folder named in a .pth file is on the path, but its .pth files are not read: no editable install takes effect.
    places = [place for place in sys.path if Path(place).name == "site-packages"]
    (site / "dependencies.pth").write_text("".join(f"{place}\n" for place in places))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "build_sdist", tmp_path_factory.mktemp("sdist"))


def checkout(folder: Path, sdist: Path) -> tuple[Path, Path]:
    return Path(sys.executable), ROOT


def editable(folder: Path, sdist: Path) -> tuple[Path, Path]:
    return environment_of(folder / "venv", build(ROOT, "build_editable", folder)), ROOT


def wheel_of_checkout(folder: Path, sdist: Path) -> tuple[Path, Path]:
    return environment_of(folder / "venv", build(ROOT, "build_wheel", folder)), folder / "venv"


def wheel_of_sdist(folder: Path, sdist: Path) -> tuple[Path, Path]:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return environment_of(folder / "venv", build(source, "build_wheel", folder)), folder / "venv"


INSTALLS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = usually(
    {
        "checkout": checkout,
        "editable": editable,
        "wheel of checkout": wheel_of_checkout,
        "wheel of sdist": wheel_of_sdist,
    },
    later=["checkout", "editable", "wheel of checkout"],
)


@pytest.mark.parametrize("install", INSTALLS)
def test_run_beside_modules_with_our_names(tmp_path: Path, sdist: Path, install: str) -> None:
    python, home = INSTALLS[install](tmp_path, sdist)
    user = tmp_path / "user"
    for name, text in USERS_FILES.items():
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text(text)

    def rankscope(*arguments: str) -> subprocess.CompletedProcess[str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "RANKSCOPE"))}
        if install == "checkout":
            known["PYTHONPATH"] = str(ROOT)
        command = [str(python), "-m", "rankscope", *arguments]
        return subprocess.run(command, cwd=user, env=known, capture_output=True, text=True, timeout=180, check=False)

    done = rankscope("run", "--run-dir", "runs/one", "--nproc-per-node", "1", "train.py")
    assert done.returncode == 0, done.stderr
    assert Path((user / "rankscope-of-0").read_text()).is_relative_to(home.resolve())

    told = rankscope("analyze", "runs/one", "--format", "json")
    assert told.returncode == 0, told.stderr
    facts = json.loads(told.stdout)["run"]
    assert (facts["num_ranks"], facts["steps"]) == (1, 12)
    assert (user / "runs" / "one" / "telemetry.duckdb").is_file()
    assert "Traceback" not in "".join(log.read_text() for log in (user / "runs" / "one" / "logs").glob("watch-*.log"))


def test_the_sdist_has_the_packages_as_they_are_in_the_checkout(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES, "rankscope"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(tracked) <= names
