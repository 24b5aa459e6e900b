"""A user's modules `trainer`, `probes`, `store` and so on beside a script, and our packages in the same process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.import_names import FOLDER, PACKAGES

ROOT = Path(__file__).parent.parent

SCRIPT = """
import sys

import analyzers, dashboard, probes, store, trainer, watch
from trainer.steps import mine

assert (mine, probes.MINE, analyzers.MINE, dashboard.MINE, store.MINE, watch.MINE) == (1, 2, 3, 4, 5, 6)

import rankscope
from rankscope.probes.collectives.groups.group_label import group_label

assert callable(rankscope.attach) and callable(rankscope.guard) and callable(rankscope.log)
assert group_label("mesh_tp", [4, 5]) == "tp:4-5"

import trainer.late, trainer.steps

assert trainer.late.other is trainer.steps.mine_too and sys.modules["trainer"].__file__.startswith(sys.path[0])
short = ("probes", "store", "analyzers", "watch", "trainer", "dashboard")
assert not [name for name, module in sys.modules.items() if name.split(".")[0] in short
            and not str(module.__file__).startswith(sys.path[0])]
print("both live")
"""

CLAIMED = """
from rankscope.import_names import claim_names

claim_names()
import probes.recorder, rankscope.probes.recorder, trainer.exit_codes

assert probes.recorder is rankscope.probes.recorder and probes.recorder.__spec__.name == "probes.recorder"
assert rankscope.attach.__module__ == "probes.attach.attach"
print("one module")
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
        "store/__init__.py": "MINE = 5\n",
        "watch.py": "MINE = 6\n",
        "script.py": SCRIPT,
        "claimed.py": CLAIMED,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )


def test_a_users_modules_and_ours_live_in_one_process(crowded: Path) -> None:
    done = run(crowded, "script.py")
    assert done.stdout == "both live\n", done.stderr


def test_a_process_of_ours_has_each_module_once(crowded: Path) -> None:
    done = run(crowded, "claimed.py")
    assert done.stdout == "one module\n", done.stderr


@pytest.mark.parametrize("arguments", [("analyze", "--help"), ("train", "--nproc-per-node", "-1")])
def test_our_commands_run_where_their_names_are_taken(crowded: Path, arguments: tuple[str, ...]) -> None:
    done = run(crowded, "-m", "rankscope", *arguments)  # the working folder is first on sys.path
    assert done.returncode == (0 if "--help" in arguments else 2), done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_runs_where_its_name_is_taken(crowded: Path) -> None:
    done = run(crowded, "-m", "rankscope.worker", "--help")
    assert "One rank of a training" in done.stdout, done.stderr


def test_the_packages_are_all_in_one_folder() -> None:
    assert all((Path(FOLDER) / package / "__init__.py").is_file() for package in PACKAGES)
