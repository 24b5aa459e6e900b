"""Cost of the probes in each framework: the same two-rank script with and without them, alternating.

    python -m benchmarks.accuracy.frameworks --quick                           # one pair of short runs each
    python -m benchmarks.accuracy.frameworks --pairs 3 --json frameworks.json  # a quarter of an hour on two cores
    python -m benchmarks.accuracy.frameworks --only accelerate,lightning_fabric

A script runs under `rankscope run` twice in a row, once attached and once with `RANKSCOPE_DISABLED=1`, which turns
everything off, including `watch`; the order alternates from pair to pair. Probes are not switched within a run, because
DDP keeps the process group with which it was created.

| figure | meaning |
|---|---|
| step | median time between two optimizer steps of a rank without probes, mean of the ranks, median of the pairs |
| ratio | median step with probes / without, per pair: median, lowest and highest |
| CPU ratio | the same for the CPU time of a rank in its steps, all threads |

A short run without probes determines how many steps take `--seconds`. The first seconds are not counted: `watch` starts
with the ranks and imports on the same cores for that long, which would not matter in a run of an hour.

The scripts are small: in steps of a few milliseconds the cost of calls dominates, so the ratio does not apply to steps
of a second. A hook after each optimizer step reads both clocks, with and without probes.
"""

from __future__ import annotations

import bisect
import importlib.util
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import argument_parser, write_json

ROOT = Path(__file__).resolve().parents[2]
STRANGERS, EXAMPLES = ROOT / "benchmarks" / "strangers", ROOT / "examples"
WARM_S = 12.0
"""Seconds after the first step that are not counted, since `watch` uses most CPU time at its start."""
TRIED_STEPS = 64
"""Steps of the run that measures the step time."""
LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script, and how it gets the number of steps. `package`: the package that it needs besides torch."""

    path: Path
    package: str = "torch"
    variable: str = "STEPS"
    """Environment variable for the number of steps; empty: the option `--steps`."""
    steps_a_unit: int = 1
    """Optimizer steps per unit of that variable."""
    arguments: tuple[str, ...] = ()


SCRIPTS = {
    "ddp": Script(path=EXAMPLES / "attach/ddp.py", variable="", arguments=("--width", "512")),
    "fsdp2": Script(path=EXAMPLES / "attach/fsdp2.py", variable="", arguments=("--dim", "128")),
    "pipelining": Script(path=STRANGERS / "pipeline_1f1b.py"),
    "huggingface": Script(path=STRANGERS / "huggingface_trainer.py", package="transformers"),
    "accelerate": Script(path=STRANGERS / "accelerate_loop.py", package="accelerate"),
    "lightning": Script(
        path=EXAMPLES / "frameworks/train_lightning.py", package="lightning", variable="", arguments=("--devices", "2")
    ),
    "fabric": Script(path=STRANGERS / "lightning_fabric.py", package="lightning", variable="EPOCHS", steps_a_unit=64),
    "huggingface_fsdp": Script(
        path=EXAMPLES / "frameworks/train_huggingface_fsdp.py", package="transformers", variable=""
    ),
    **{
        name: Script(path=EXAMPLES / f"frameworks/train_{name}.py", package=package, variable="")
        for name, package in (
            ("trl", "trl"),
            ("torchtitan", "torchtitan"),
            ("torchtune", "torchtune"),
            ("torchft", "torchft"),
            ("deepspeed", "deepspeed"),
            ("megatron", "megatron"),
        )
    },
}


def main() -> None:
    """Print the table; frameworks that are not installed are listed and skipped."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="timed seconds per run")
    parser.add_argument("--only", default=",".join(SCRIPTS))
    parser.add_argument("--quick", action="store_true", help="one pair of two seconds")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.seconds = 1, 2.0
    found: dict[str, Any] = {}
    for name in options.only.split(","):
        script = SCRIPTS[name]
        if importlib.util.find_spec(script.package) is None or not script.path.exists():
            print(f"{name}: left out, {script.package} is not installed")
            continue
        step_s, _ = _run(script, "bare", TRIED_STEPS, warm_s=0.0)
        num_steps = max(TRIED_STEPS, round((WARM_S + options.seconds) / step_s))
        pairs = [_pair(script, num_steps, turn) for turn in range(options.pairs)]
        found[name] = _ratios(pairs)
        print(f"{name}: {found[name]['ratio']:.3f}", flush=True)
    _show(found)
    write_json(options.json, {"frameworks": found, "load": os.getloadavg()[0]})


def _pair(script: Script, num_steps: int, turn: int) -> dict[str, tuple[float, float]]:
    """{arm: (median step in seconds, CPU seconds per step)}, both as means over the ranks."""
    arms = ("bare", "probes") if turn % 2 == 0 else ("probes", "bare")
    return {arm: _run(script, arm, num_steps) for arm in arms}


def _run(script: Script, arm: str, num_steps: int, warm_s: float = WARM_S) -> tuple[float, float]:
    units = str(-(-num_steps // script.steps_a_unit))
    arguments = [*script.arguments, *(() if script.variable else ("--steps", units))]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEP_CLOCK_FOLDER": folder}
        environment |= {"STEP_CLOCK_WARM_S": str(warm_s)}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))}
        environment |= {script.variable: units} if script.variable else {}
        environment |= {"RANKSCOPE_DISABLED": "1"} if arm == "bare" else {}
        done = subprocess.run(
            [sys.executable, "-m", "rankscope", "run", "--nproc-per-node", "2", "--run-dir", f"{folder}/run",
             str(Path(__file__).resolve()), str(script.path), *arguments],
            env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(f"{script.path.name} ({arm}) failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        if (Path(folder) / "run" / "tapes").exists() != (arm == "probes"):
            raise SystemExit(f"{script.path.name} ({arm}): the probes were {'off' if arm == 'probes' else 'on'}")
        measured = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("clock-*.json"))]
    if len(measured) != 2:
        raise SystemExit(f"{script.path.name} ({arm}): {len(measured)} of 2 ranks wrote their times")
    return statistics.mean(one["wall_s"] for one in measured), statistics.mean(one["cpu_s"] for one in measured)


def _run_as_rank(words: list[str]) -> None:
    """Program of each rank: the unchanged script, with clocks read after each optimizer step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    walls: list[float] = []
    cpus: list[float] = []

    def stepped(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
        walls.append(time.perf_counter())
        cpus.append(time.process_time())

    register_optimizer_step_post_hook(stepped)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
    first = bisect.bisect(walls, walls[0] + float(os.environ["STEP_CLOCK_WARM_S"]))
    timed, used = walls[first:], cpus[first:]
    result = {
        "wall_s": statistics.median(after - before for before, after in itertools.pairwise(timed)),
        "cpu_s": (used[-1] - used[0]) / (len(used) - 1),
    }
    Path(os.environ["STEP_CLOCK_FOLDER"], f"clock-{os.environ['RANK']}.json").write_text(json.dumps(result))


def _ratios(pairs: list[dict[str, tuple[float, float]]]) -> dict[str, float]:
    walls = [pair["probes"][0] / pair["bare"][0] for pair in pairs]
    cpus = [pair["probes"][1] / pair["bare"][1] for pair in pairs]
    return {
        "step_ms": 1e3 * statistics.median(pair["bare"][0] for pair in pairs),
        "ratio": statistics.median(walls),
        "lowest": min(walls),
        "highest": max(walls),
        "cpu_ratio": statistics.median(cpus),
        "cpu_lowest": min(cpus),
        "cpu_highest": max(cpus),
    }


def _show(found: dict[str, Any]) -> None:
    table = Table("framework", "step", "ratio", "CPU ratio")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['step_ms']:.2f} ms",
            f"{row['ratio']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})",
            f"{row['cpu_ratio']:.3f} ({row['cpu_lowest']:.3f} to {row['cpu_highest']:.3f})",
        )
    Console(width=100).print(table)
    print(f"load {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")


if __name__ == "__main__":
    if "STEP_CLOCK_FOLDER" in os.environ and "RANK" in os.environ:
        _run_as_rank(sys.argv[1:])
    else:
        main()
