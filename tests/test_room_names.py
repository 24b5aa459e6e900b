"""A user's own `trainer`, `probes`, `analyzers` and `dashboard` beside his script, and ours in the same process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope._rooms import FOLDER, ROOMS

ROOT = Path(__file__).parent.parent

SCRIPT = """
import pickle
import sys

import trainer, probes, analyzers, dashboard
from trainer.steps import mine

assert (mine, probes.MINE, analyzers.MINE, dashboard.MINE) == (1, 2, 3, 4)

import rankscope
from rankscope._rooms.probes.group_label import group_label
from rankscope._rooms.analyzers.spike import SpikeDetector, SpikePolicy
from rankscope._rooms.trainer.checkpoint.ledger import Ledger

assert group_label("mesh_tp", [4, 5]) == "tp:4-5"
ledger = pickle.loads(pickle.dumps(Ledger(rollbacks=3)))
assert ledger.rollbacks == 3 and type(ledger) is Ledger
assert type(ledger).__module__ == "rankscope._rooms.trainer.checkpoint.ledger"

import rankscope._rooms.trainer.exit_codes
import trainer.steps, trainer.late

assert trainer.late.other is trainer.steps.mine_too and sys.modules["trainer"].__file__.startswith(sys.path[0])
assert not [name for name in sys.modules if name.split(".")[0] in ("probes", "analyzers", "trainer", "dashboard")
            and "rankscope" in str(getattr(sys.modules[name], "__file__", ""))]
print("both live")
"""


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A folder in which every name of ours is taken."""
    for name, text in {
        "trainer/__init__.py": "",
        "trainer/steps.py": "mine = 1\nmine_too = object()\n",
        "trainer/late.py": "from trainer.steps import mine_too as other\n",
        "probes.py": "MINE = 2\n",
        "analyzers.py": "MINE = 3\n",
        "dashboard/__init__.py": "MINE = 4\n",
        "script.py": SCRIPT,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_users_modules_and_ours_live_in_one_process(crowded: Path) -> None:
    done = run(crowded, "script.py")
    assert done.stdout == "both live\n", done.stderr


@pytest.mark.parametrize("arguments", [("analyze", "--help"), ("train", "--nproc-per-node", "-1")])
def test_our_commands_run_where_their_names_are_taken(crowded: Path, arguments: tuple[str, ...]) -> None:
    done = run(crowded, "-m", "rankscope", *arguments)  # the working folder is first on sys.path
    assert done.returncode == (0 if "--help" in arguments else 2), done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_runs_where_its_name_is_taken(crowded: Path) -> None:
    done = run(crowded, "-m", "rankscope.worker", "--help")
    assert "One rank of a training" in done.stdout, done.stderr


def test_the_rooms_are_all_in_one_folder() -> None:
    assert all((Path(FOLDER) / room / "__init__.py").is_file() for room in ROOMS)
