"""Slow rank and phase as named by TraceML and by Rankscope, in separate runs of one script, for each slow phase.

    python -m benchmarks.cost.compare_traceml --traceml-python PYTHON     # with traceml-ai and torch
    python -m benchmarks.cost.compare_traceml --traceml-python PYTHON --places forward,nothing --delay-ms 20 --steps 200

The script is plain DDP; rank 1 is delayed at one place in each step. For TraceML each step is wrapped in `trace_step`,
as its documentation requires; for Rankscope the script is unchanged. TraceML's answer is `primary_diagnosis` and the
diagnosis of the step time in its `final_summary.json`; Rankscope's is every finding of `rankscope analyze`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import argument_parser, write_json
from probes.tape.rundir import RunDir
from watch.verdicts.diagnosed_run import diagnosed_run

PLACES = (
    "nothing", "data", "batch", "forward", "after_forward", "backward", "clipping", "before_optimizer",
    "after_optimizer", "garbage",
)  # fmt: skip
SLOW_RANK = 1
LIMIT_S = 600.0
READY_S = 240.0
"""Start-up timeout of TraceML's aggregator; its default of 15 s is too short on a loaded machine."""
LAUNCH_TRACEML = f"""
import sys
import traceml_ai.launcher.commands as commands
commands.DEFAULT_TCP_READY_TIMEOUT_SEC = {READY_S}
from traceml_ai.launcher.cli import main
sys.exit(main())
"""
SCRIPT = """
import contextlib, gc, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

slow_place, delay_s, num_steps, tool = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if tool == "traceml":
    import traceml_ai as traceml
    traceml.init()
    trace_step = traceml.trace_step
else:
    trace_step = contextlib.nullcontext
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
is_slow = dist.get_rank() == 1


def place(name):
    if not is_slow or name != slow_place:
        return
    until = time.monotonic() + delay_s
    while name == "garbage" and time.monotonic() < until:
        gc.collect()
    time.sleep(max(0.0, until - time.monotonic()))


class Samples(Dataset):
    def __len__(self):
        return 32 * num_steps

    def __getitem__(self, index):
        if index % 32 == 1:  # first of a batch of the second rank
            place("data")
        return torch.full((256,), index / 1e4), index % 10


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return values.view_as(values)

    @staticmethod
    def backward(context, gradient):
        place("backward")
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 10)

    def forward(self, values):
        place("forward")
        return self.second(Slow.apply(torch.relu(self.first(values))))


model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dataset = Samples()
sampler = DistributedSampler(dataset, shuffle=False)
for values, target in DataLoader(dataset, batch_size=16, sampler=sampler):
    with trace_step(model):
        place("batch")
        noise = torch.randn_like(values)
        output = model(values + noise)
        loss = nn.functional.cross_entropy(output, target)
        place("after_forward")
        loss.backward()
        place("clipping")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        place("before_optimizer")
        place("garbage")
        optimizer.step()
        optimizer.zero_grad()
        place("after_optimizer")
dist.destroy_process_group()
"""


def ask_rankscope(script: Path, words: list[str], folder: Path) -> dict[str, Any]:
    """Run the script under `rankscope run` and diagnose the run."""
    run = RunDir(folder / "run")
    command = [sys.executable, "-m", "rankscope", "run", "--run-dir", str(run.path), "--nproc-per-node", "2"]
    launch([*command, str(script), *words, "rankscope"], folder / "rankscope.log", os.environ)
    with diagnosed_run(run, is_over=True) as (_, diagnosis):
        found = [
            {
                "kind": one.kind, "ranks": list(one.ranks), "cause": one.cause, "place": one.evidence.get("place"),
                "line": one.evidence.get("line"), "summary": one.summary,
            }
            for one in diagnosis.fired
        ]  # fmt: skip
        return {"verdict": diagnosis.verdict, "findings": found}


def ask_traceml(python: str, script: Path, words: list[str], folder: Path) -> dict[str, Any]:
    """Run the script under `traceml run` and read its summary."""
    command = [python, "-c", LAUNCH_TRACEML, "run", str(script), "--nproc-per-node", "2"]
    command += ["--logs-dir", str(folder / "traceml"), "--run-name", "run", "--args", *words, "traceml"]
    launch(command, folder / "traceml.log", {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"})
    summary = json.loads((folder / "traceml" / "run" / "final_summary.json").read_text())
    return {"primary": summary["primary_diagnosis"], "step_time": summary["step_time"]["diagnosis"]}


def launch(command: list[str], log: Path, environment: Mapping[str, str]) -> None:
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}: {log.read_text()[-2000:]}")


def main() -> int:
    """Return 1 if Rankscope did not name exactly the slow rank, or named one when nothing was slow."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--traceml-python", help="interpreter with traceml-ai; without it only Rankscope runs")
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--delay-ms", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    console, rows, wrong = Console(width=200), {}, 0
    for name in options.places.split(","):
        words = [name, str(options.delay_ms / 1e3), str(options.steps)]
        with tempfile.TemporaryDirectory(prefix="traceml-") as path:
            folder = Path(path)
            script = folder / "train.py"
            script.write_text(SCRIPT)
            answer = ask_rankscope(script, words, folder)
            traceml = ask_traceml(options.traceml_python, script, words, folder) if options.traceml_python else None
        rows[name] = {"rankscope": answer, "traceml": traceml}
        findings = answer["findings"]
        slow = [tuple(one["ranks"]) for one in findings]
        wrong += slow != ([] if name == "nothing" else [(SLOW_RANK,)])
        texts = [f"rank {one['ranks']} {one['cause']} {one['place']} {one['line'] or ''}" for one in findings]
        console.print(f"{name}: Rankscope: {'; '.join(texts) or 'nothing'}", markup=False, highlight=False)
        if traceml is not None:
            primary = traceml["primary"]
            console.print(f"{name}: TraceML: {primary['kind']}: {primary['summary']}", markup=False, highlight=False)
        write_json(options.json, rows)
    console.print(f"Rankscope is right in {len(rows) - wrong} of {len(rows)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
