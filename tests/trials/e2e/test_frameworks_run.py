"""Frameworks under `rankscope run`, two ranks, their scripts unchanged: a clean run is silent, and of a slow rank its
number, the place and the mesh are named.

Those that are not among our own extras run where they are installed (docs/frameworks.md has their versions).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launched import rankscope
from tests.e2e.script_ranks import ROOT
from trainer.drills.script.drill import script_drill
from trainer.drills.script.execute import Plan

pytestmark = pytest.mark.trial(times=1)

EXAMPLES, LOOPS = ROOT / "examples" / "frameworks", ROOT / "benchmarks" / "strangers"
FIRST_SLOW, STEPS = 25, 90


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A script and what is derived from it. `package`: what it needs beside torch."""

    words: tuple[str, ...]
    package: str = "torch"
    mesh: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def _example(name: str, *options: str) -> tuple[str, ...]:
    return (str(EXAMPLES / f"train_{name}.py"), "--steps", str(STEPS), *options)


FRAMEWORKS = {
    "accelerate": Framework(
        package="accelerate", words=(str(LOOPS / "accelerate_loop.py"),), variables={"STEPS": str(2 * STEPS)}
    ),
    "fabric": Framework(package="lightning", words=(str(LOOPS / "lightning_fabric.py"),), variables={"EPOCHS": "2"}),
    "lightning": Framework(package="lightning", words=_example("lightning", "--devices", "2")),
    "huggingface_fsdp": Framework(package="transformers", words=_example("huggingface_fsdp")),
    "pipelining": Framework(words=(str(LOOPS / "pipeline_1f1b.py"),), mesh={"pp": 2}, variables={"STEPS": str(STEPS)}),
    "trl": Framework(package="trl", words=_example("trl")),
    "torchtitan": Framework(package="torchtitan", words=_example("torchtitan"), mesh={"dp_shard": 2}),
    "torchtitan_tp": Framework(package="torchtitan", words=_example("torchtitan", "--tp", "2"), mesh={"tp": 2}),
    "torchtune": Framework(package="torchtune", words=_example("torchtune"), mesh={"dp_shard": 2}),
    "torchft": Framework(package="torchft", words=_example("torchft")),
    "deepspeed_zero1": Framework(
        package="deepspeed", words=_example("deepspeed", "--stage", "1"), variables={"DS_ACCELERATOR": "cpu"}
    ),
    "deepspeed_zero3": Framework(
        package="deepspeed", words=_example("deepspeed", "--stage", "3"), variables={"DS_ACCELERATOR": "cpu"}
    ),
    "megatron": Framework(package="megatron.core", words=_example("megatron"), mesh={"tp": 2}),
}


def analysis(run_dir: Path) -> dict[str, Any]:
    done = rankscope("analyze", str(run_dir), "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stragglers(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one for one in found["findings"] if one["kind"] == "straggler" and one["status"] == "fired"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_slow_rank_is_named_and_a_clean_run_is_silent(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = FRAMEWORKS[name]
    pytest.importorskip(framework.package)
    for variable, value in framework.variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    plan = Plan(words=framework.words, num_ranks=2, step=FIRST_SLOW, steps_after=10 * STEPS)  # each ends by itself
    rows = list(script_drill(plan, ["slow_forward"], folder=tmp_path, keep=True, slow_ratio=5.0))
    assert [row.fault for row in rows] == ["none", "slow_forward"], rows
    assert all(row.is_right for row in rows), json.dumps([row.to_json() for row in rows], indent=1)
    assert [(row.is_injected, row.right_rank, row.right_place) for row in rows[1:]] == [(True, True, True)]
    assert analysis(tmp_path / "slow_forward" / "run")["run"]["mesh"] == framework.mesh


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_slowest_phase_of_grpo_and_the_rank_that_is_slow_in_one_are_named(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    command = [sys.executable, "-m", "rankscope", "run", "--nproc-per-node", "2", "--run-dir", "run"]
    script = [str(EXAMPLES / "train_trl.py"), "--steps", "80", "--slow", "0.5"]
    done = subprocess.run([*command, *script], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = analysis(tmp_path / "run")
    times = {one["name"]: one["own_ms"] for one in found["run"]["named_phases"]}
    assert {"generation", "reward", "training"} <= set(times)
    assert max(times, key=lambda name: times[name]) in ("generation", "reward")
    (slow,) = stragglers(found)
    assert (slow["ranks"], slow["evidence"]["named_phase"]) == ([1], "reward")
    assert slow["evidence"]["place"] == "before_forward"
    assert "in its phase reward" in slow["summary"]
    assert slow["evidence"]["excess_ms"] == pytest.approx(500, rel=0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_worker_of_ray_train_is_named(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    script = [str(EXAMPLES / "train_ray.py"), "--steps", "80", "--slow", "0.1", "--run-dir", str(tmp_path / "run")]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, *script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = analysis(tmp_path / "run")
    assert found["run"]["num_ranks"] == 2
    (slow,) = stragglers(found)
    assert (slow["ranks"], slow["evidence"]["place"]) == ([1], "forward")
