"""Cost of TraceML and of Rankscope on the same script, each relative to the bare script in a separate interpreter.

    python -m benchmarks.cost.compare_traceml_cost --traceml-python PYTHON     # with traceml-ai and torch

Runs the script of `benchmarks.cost.compare_traceml` with two ranks and no delay. Each round has four arms in rotating
order: under `rankscope run` and under `traceml run`, each attached and switched off (`RANKSCOPE_DISABLED=1`,
`--disable-traceml`). The first half of a run's steps is not counted.

| figure | meaning |
|---|---|
| step | median time between two optimizer steps, mean of the ranks, median of the rounds, switched off |
| ratio | median step attached / switched off, per round: median, lowest and highest |
| CPU ratio | the same for the CPU time of a rank in its steps, all threads |
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cost.compare_traceml import LAUNCH_TRACEML, SCRIPT, launch
from benchmarks.harness import argument_parser, write_json

CLOCK = """
import json as _json, os as _os, statistics as _statistics, time as _time
from torch.optim.optimizer import register_optimizer_step_post_hook as _hook
_ticks = []
_hook(lambda *_: _ticks.append((_time.perf_counter(), _time.process_time())))
"""
RESULT = """
_timed = _ticks[len(_ticks) // 2 :]
_steps = [after[0] - before[0] for before, after in zip(_timed, _timed[1:])]
with open(_os.path.join(sys.argv[5], f"clock-{_os.environ['RANK']}.json"), "w") as _file:
    _json.dump({"wall_s": _statistics.median(_steps), "cpu_s": (_timed[-1][1] - _timed[0][1]) / len(_steps)}, _file)
"""
TOOLS = ("rankscope", "traceml")


def main() -> None:
    """Run the benchmark."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--traceml-python", required=True, help="interpreter with traceml-ai")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8000)
    options = parser.parse_args()
    arms = [(tool, is_on) for tool in TOOLS for is_on in (False, True)]
    rounds = []
    for turn in range(options.rounds):
        order = arms[turn % len(arms) :] + arms[: turn % len(arms)]
        rounds.append({arm: _run(*arm, options.steps, options.traceml_python) for arm in order})
    table = Table("tool", "step", "ratio", "CPU ratio")
    figures = {}
    for tool in TOOLS:
        walls, cpus = ([one[tool, True][i] / one[tool, False][i] for one in rounds] for i in (0, 1))
        step_ms = 1e3 * statistics.median(one[tool, False][0] for one in rounds)
        figures[tool] = {"step_ms": step_ms, "ratios": walls, "cpu_ratios": cpus}
        table.add_row(tool, f"{step_ms:.2f} ms", _spread(walls), _spread(cpus))
    Console(width=100).print(table)
    print(f"load {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")
    write_json(options.json, figures)


def _run(tool: str, is_on: bool, num_steps: int, traceml_python: str) -> tuple[float, float]:
    """(median step in seconds, CPU seconds per step), means over the ranks."""
    with tempfile.TemporaryDirectory(prefix="traceml-") as path:
        folder = Path(path)
        script = folder / "train.py"
        script.write_text(CLOCK + SCRIPT + RESULT)
        words = ["nothing", "0", str(num_steps), tool if is_on else "none", path]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = "1"
        if tool == "rankscope":
            environment |= {} if is_on else {"RANKSCOPE_DISABLED": "1"}
            environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
            command = [sys.executable, "-m", "rankscope", "run", "--run-dir", f"{path}/run", "--nproc-per-node", "2"]
            command += [str(script), *words]
        else:
            command = [traceml_python, "-c", LAUNCH_TRACEML, "run", str(script), "--nproc-per-node", "2"]
            command += ["--logs-dir", f"{path}/traceml", "--run-name", "run"]
            command += [*(() if is_on else ("--disable-traceml",)), "--args", *words]
        launch(command, folder / "log", environment)
        measured = [json.loads((folder / f"clock-{rank}.json").read_text()) for rank in range(2)]
    return statistics.mean(one["wall_s"] for one in measured), statistics.mean(one["cpu_s"] for one in measured)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
