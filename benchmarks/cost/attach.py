"""Cost of `rankscope.attach` in a typical script, compared with other tools that log the same numbers.

    python -m benchmarks.cost.attach --quick                  # about two minutes
    python -m benchmarks.cost.attach --rounds 6 --json attach.json

The scripts of `examples/attach/` run with two ranks and one kind of logging per run, in alternating order, so that
other load affects all kinds. Each logs loss, gradient norm and learning rate of every step:

    bare            the script without Rankscope
    rankscope       attached, including `watch`
    run             unchanged, as started by `rankscope run`
    tensorboard     three scalars per step with torch's SummaryWriter on rank 0
    wandb           `wandb.log` of three numbers per step on rank 0, offline
    profiler        torch.profiler on every rank for all steps, CPU activity: records phases and collectives, too

| figure | meaning |
|---|---|
| ratio | median step / median step of bare, per round: median, lowest and highest |
| CPU ratio | the same for the CPU time of a rank in its steps, all threads |
| import | wall time of `import rankscope; rankscope.attach` in a process that has imported torch: the minimum of many |
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import platform
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import argument_parser, write_json
from probes.tape.events import read_events

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "attach"
KINDS = ("bare", "rankscope", "run", "tensorboard", "wandb", "profiler")
SCRIPTS = {"ddp": ("ddp.py", ["--width", "512"]), "fsdp2": ("fsdp2.py", ["--dim", "128"])}
WARM_STEPS = 10


def main() -> None:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--scripts", default="ddp,fsdp2")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--quick", action="store_true", help="two rounds of 60 steps")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 60
    kinds = [kind for kind in options.kinds.split(",") if kind in ("bare", *_available())]
    console = Console(width=110)
    figures: dict[str, Any] = {"import_ms": measure_import(), "cpu": platform.processor(), "scripts": {}}
    console.print(f"import rankscope; rankscope.attach: {figures['import_ms']:.0f} ms beyond torch")
    for script in options.scripts.split(","):
        rounds = [_round(script, kinds, options.steps, turn) for turn in range(options.rounds)]
        figures["scripts"][script] = _ratios(rounds, kinds)
        _show(console, script, figures["scripts"][script])
    write_json(options.json, figures)


def measure_import(repeats: int = 15) -> float:
    """Minimum time of the import after torch's (ms), each in a new process.

    torch leaves so many new objects that a full garbage collection (85 ms) would begin in one of the next imports: it
    runs before the clock starts.
    """
    program = (
        "import gc, time, torch; gc.collect(); start = time.perf_counter(); import rankscope; rankscope.attach; "
        "print(time.perf_counter() - start)"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True) for _ in range(repeats)]
    return 1e3 * min(float(run.stdout) for run in runs)


def _available() -> list[str]:
    missing = [name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"left out, not installed: {', '.join(missing)}\n")
    return [kind for kind in KINDS if kind not in missing]


def _round(script: str, kinds: list[str], steps: int, turn: int) -> dict[str, tuple[float, float]]:
    """{kind: (median step in seconds, CPU seconds per step)}, means over the ranks; the order of kinds rotates."""
    order = kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]
    return {kind: _world(script, kind, steps) for kind in order}


def _world(script: str, kind: str, steps: int, world_size: int = 2) -> tuple[float, float]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.profiler"])
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        common = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(port), "RANKSCOPE_RUN_DIR": f"{folder}/run", "OMP_NUM_THREADS": "1"}
        common |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": folder}
        ranks = []
        for rank in range(world_size):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_rank, args=(script, kind, steps, folder, environment))
            process.start()
            ranks.append(process)
        for process in ranks:
            process.join(170)
        if any(process.exitcode != 0 for process in ranks):
            raise RuntimeError(f"{script} with {kind}: exit codes {[process.exitcode for process in ranks]}")
        measured = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]
        _await_watch(Path(folder) / "run")
    return statistics.mean(m["wall_s"] for m in measured), statistics.mean(m["cpu_s"] for m in measured)


def _await_watch(run: Path) -> None:
    """Wait until the node process has ended: it still writes to the folder that is removed next."""
    deadline = time.monotonic() + 20
    events = run / "tapes" / "node-00000" / "events.jsonl"
    found = read_events(events)[0] if events.exists() else []
    pids = [event["pid"] for event in found if event["kind"] == "watch_started"]
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)


def _rank(script: str, kind: str, steps: int, folder: str, environment: dict[str, str]) -> None:
    """One rank: the unchanged script, with a kind of logging around its optimizer's step."""
    os.environ.update(environment)
    os.chdir(folder)
    name, arguments = SCRIPTS[script]
    lines = [line for line in (EXAMPLES / name).read_text().splitlines() if "rankscope" not in line]
    path = EXAMPLES / name
    if kind != "rankscope":
        path = Path(folder) / f"{environment['RANK']}_{name}"
        path.write_text("\n".join(lines) + "\n")
    arguments = [str(path), *arguments, "--steps", str(steps)]
    with _logging(kind, folder) as log:
        clock = _StepClock(log)
        if kind == "run":
            from rankscope.attached_script import main as run_script

            sys.path.insert(0, "")
            run_script(arguments)
        else:
            sys.argv = arguments
            runpy.run_path(str(path), run_name="__main__")
    Path(f"{folder}/{environment['RANK']}.json").write_text(json.dumps(clock.result()))


class _StepClock:
    """Measures wall and CPU time between optimizer steps, for every kind, so that its cost cancels out of the ratio."""

    def __init__(self, log: Any) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.losses: list[float] = []
        real = torch.Tensor.backward

        def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
            self.losses.append(loss.item())
            real(loss, *args, **kwargs)

        torch.Tensor.backward = backward  # type: ignore[method-assign]

        def stepped(optimizer: Any, *unused: Any) -> None:
            if log is not None:
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
                norm = torch.nn.utils.get_total_norm(local).item()
                log(len(self.walls), self.losses[-1], norm, optimizer.param_groups[0]["lr"])
            self.walls.append(time.perf_counter())
            self.cpus.append(time.process_time())

        register_optimizer_step_post_hook(stepped)

    def result(self) -> dict[str, float]:
        walls, cpus = self.walls[WARM_STEPS:], self.cpus[WARM_STEPS:]
        return {
            "wall_s": statistics.median(after - before for before, after in itertools.pairwise(walls)),
            "cpu_s": (cpus[-1] - cpus[0]) / (len(cpus) - 1),
        }


@contextlib.contextmanager
def _logging(kind: str, folder: str) -> Iterator[Any]:
    """A function that logs (step, loss, norm, rate), or None."""
    first = os.environ["RANK"] == "0"
    if kind == "tensorboard" and first:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder) as writer:

            def log(step: int, *values: float) -> None:
                for name, value in zip(("loss", "grad_norm", "lr"), values, strict=True):
                    writer.add_scalar(name, value, step)

            yield log
    elif kind == "wandb" and first:
        import wandb

        run = wandb.init(project="attach")
        yield lambda step, loss, norm, rate: run.log({"loss": loss, "grad_norm": norm, "lr": rate}, step=step)
        run.finish()
    elif kind == "profiler":
        from torch.profiler import ProfilerActivity, profile, schedule

        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=20),
            on_trace_ready=lambda p: p.export_chrome_trace(f"{folder}/trace-{os.environ['RANK']}.json"),
        ) as profiler:
            yield lambda *values: profiler.step()
    else:
        yield None


def _ratios(rounds: list[dict[str, tuple[float, float]]], kinds: list[str]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in kinds:
        walls = [r[kind][0] / r["bare"][0] for r in rounds]
        cpus = [r[kind][1] / r["bare"][1] for r in rounds]
        found[kind] = {
            "step_ms": 1e3 * statistics.median(r[kind][0] for r in rounds),
            "ratio": statistics.median(walls),
            "lowest": min(walls),
            "highest": max(walls),
            "cpu_ratio": statistics.median(cpus),
        }
    return found


def _show(console: Console, script: str, figures: dict[str, dict[str, float]]) -> None:
    table = Table(title=script, title_justify="left")
    for column in ("kind", "step", "ratio", "lowest", "highest", "CPU ratio"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, row in figures.items():
        ratios = [f"{row[name]:.3f}" for name in ("ratio", "lowest", "highest", "cpu_ratio")]
        table.add_row(kind, f"{row['step_ms']:.2f} ms", *ratios)
    console.print(table)


if __name__ == "__main__":
    main()
