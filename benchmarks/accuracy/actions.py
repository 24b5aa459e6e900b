"""Speed gained by excluding or replacing a slow node, measured from the records of real runs over gloo.

    python -m benchmarks.accuracy.actions
    python -m benchmarks.accuracy.actions --only replace --json actions.json

Three launchers on this machine act as three nodes, each with a watch and one rank. Node 1 has a slow device: each
forward pass of a transformer block computes until it has taken `--factor` times as long. This happens in every attempt
in which the node takes part, so that a restart alone makes nothing faster.

| run | settings | expected |
|---|---|---|
| dry run | `recovery.on_straggler=exclude`, `recovery.exclusion_dry_run=true` | one event, and nothing else changes |
| exclude | `recovery.on_straggler=exclude` | two nodes continue with the same global batch |
| replace | `recovery.on_straggler=replace`, the batch fits two nodes, the third waits | the third replaces node 1 |

The table has values before and after the exclusion (or the dry run's event): number of ranks, median step of rank 0,
tokens per second computed from it, and the mean share of a step for which ranks wait in collectives. `restart` is the
time from the last step before the event to the first step after it. The action has paid off once
`restart / (1 - step after / step before)` has passed.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from analyzers.account.by_step import account_by_step
from benchmarks.harness import argument_parser, write_json
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store

ARMS = {
    "dry run": ("recovery.on_straggler=exclude", "recovery.exclusion_dry_run=true", "train.global_batch_size=6"),
    "exclude": ("recovery.on_straggler=exclude", "train.global_batch_size=6"),
    "replace": ("recovery.on_straggler=replace", "train.global_batch_size=4"),
}
SETTINGS = (
    "run.name=actions", "model.dim=64", "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=4",
    "data.seq_len=64", "train.device=cpu", "train.steps=1000000", "checkpoint.interval=0", "parallel.dp_shard=-1",
    "recovery.rejoin_s=5", "recovery.straggler_after_s=2", "recovery.exclusion_cooldown_s=600",
)  # fmt: skip
NUM_NODES, SLOW_NODE = 3, 1
WARMUP_STEPS = 5
SHOWN = (("world_size", 1, ""), ("step_ms", 1, ""), ("tokens_per_s", 1, ""), ("waiting_ratio", 100, " %"))
DEADLINE_S = 600.0
SLOW_DEVICE = '''
"""A slow device: transformer blocks compute FACTOR times as long. Loaded by each interpreter of the node."""
import time
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

began, matrix = {}, torch.ones(32, 32)

def before(module, inputs):
    if type(module).__name__.endswith("Block"):  # FSDP's class has the same ending
        began[id(module)] = time.monotonic()

def after(module, inputs, output):
    start = began.pop(id(module), None)
    if start is not None:
        until = start + FACTOR * (time.monotonic() - start)
        while time.monotonic() < until:
            matrix @ matrix

register_module_forward_pre_hook(before)
register_module_forward_hook(after)
'''


def measure(arm: str, folder: Path, *, factor: float, num_steps: int) -> dict[str, Any]:
    """Run until `num_steps` steps after the exclusion, or after the dry run's event."""
    slow = folder / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DEVICE.replace("FACTOR", str(factor)))
    port, nodes = _free_port(), []
    try:
        for node_rank in range(NUM_NODES):
            nodes.append(_node(arm, folder, node_rank, port, slow if node_rank == SLOW_NODE else None))
            _wait(lambda: (folder / "runs" / "latest").exists(), nodes[0])
        run = RunDir.open(folder / "runs" / "latest")
        kind = event_kinds.EXCLUSION_WITHHELD if arm == "dry run" else event_kinds.EXCLUDED
        _wait(lambda: _node_events(run, kind), nodes[0])
        action = _node_events(run, kind)[0]
        _wait(lambda: _steps_since(run, action["wall_ns"]) >= num_steps + WARMUP_STEPS, nodes[0])
        _stop(nodes)
        return _read(run, action)
    finally:
        _stop(nodes)


def _free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _node(arm: str, folder: Path, node_rank: int, port: int, slow: Path | None) -> subprocess.Popen[bytes]:
    settings = [part for text in (*SETTINGS, f"run.dir={folder / 'runs'}", *ARMS[arm]) for part in ("--set", text)]
    where = ["--nnodes", f"2:{NUM_NODES}", "--node-rank", str(node_rank), "--rdzv-endpoint", f"localhost:{port}"]
    path = os.pathsep.join(filter(None, (str(slow or ""), os.environ.get("PYTHONPATH", ""))))
    with (folder / f"node-{node_rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rankscope", "train", *settings, *where, "--nproc-per-node", "1"],
            stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip


def _stop(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    for node in nodes:
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
    for node in nodes:
        try:
            node.wait(90)
        except subprocess.TimeoutExpired:
            node.kill()


def _read(run: RunDir, action: dict[str, Any]) -> dict[str, Any]:
    """Measure the steps before and after an event."""
    started = _node_events(run, event_kinds.ATTEMPT_STARTED)
    worlds = {event["attempt"]: event["world_size"] for event in started}
    config = run.manifest()["config"]
    num_tokens = config["train"]["global_batch_size"] * config["data"]["seq_len"]
    with Store.open(run) as store:
        rows = store.rows(
            "SELECT attempt, step, start_ns + duration_ns, duration_ns / 1e6 FROM steps "
            "WHERE rank = 0 AND committed AND attempt >= ? ORDER BY attempt, step", [action["attempt"]],
        )  # fmt: skip
        parts = {}
        for name in ("before", "after"):
            in_part = [row for row in rows if (row[2] > action["wall_ns"]) == (name == "after")]
            if name == "after" and action["kind"] == event_kinds.EXCLUDED:  # not the last steps of the old attempt
                in_part = [row for row in in_part if row[0] > action["attempt"]]
            judged = in_part[WARMUP_STEPS:]
            steps = [row[1] for row in judged]
            parts[name] = {
                "world_size": worlds[judged[0][0]],
                "num_steps": len(judged),
                "step_ms": (step_ms := statistics.median(row[3] for row in judged)),
                "tokens_per_s": num_tokens * 1e3 / step_ms,
                "waiting_ratio": _waiting_ratio(store, min(steps), max(steps)),
            }
    newest_before = max(row[2] for row in rows if row[0] == action["attempt"])
    later = [row[2] for row in rows if row[0] > action["attempt"]]
    before_ms, after_ms = parts["before"]["step_ms"], parts["after"]["step_ms"]
    restart_s = (min(later) - newest_before) / 1e9 if later else 0.0
    return {
        **parts,
        "dry_runs": sum(event["dry_run"] for event in _node_events(run, event_kinds.EXCLUSION_WITHHELD)),
        "excluded": len(_node_events(run, event_kinds.EXCLUDED)),
        "requests": len(_node_events(run, event_kinds.EXCLUSION_REQUESTED)),
        "attempts_after": max(worlds) - action["attempt"],
        "restart_s": restart_s,
        "pays_after_s": restart_s / (1 - after_ms / before_ms) if later and after_ms < before_ms else None,
        "reason": action["reason"],
    }


def _waiting_ratio(store: Store, first_step: int, last_step: int) -> float:
    """Share of the ranks' time in these steps in which they wait in collectives."""
    account = account_by_step(store, first_step=first_step, last_step=last_step)
    return float(np.nansum(account.of("waiting")) / np.nansum(account.ns))


def _node_events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    found = [event for _, folder in run.node_dirs() for event in read_events(folder / "events.jsonl")[0]]
    return sorted((event for event in found if event["kind"] == kind), key=lambda event: event["wall_ns"])


def _steps_since(run: RunDir, wall_ns: int) -> int:
    with Store.open(run) as store:
        if not store.has("steps"):
            return 0
        sql = "SELECT count(*) FROM steps WHERE rank = 0 AND committed AND start_ns > ?"
        return int(store.rows(sql, [wall_ns])[0][0])


def _wait(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended or did not continue: see its folder")
        time.sleep(0.5)


def main() -> None:
    """Print the table; exit with code 1 if an action had no effect, or the dry run had one."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--only", choices=sorted(ARMS), action="append", help="run only these (all)")
    parser.add_argument("--factor", type=float, default=8.0, help="slowdown of the forward pass on node 1 (8)")
    parser.add_argument("--steps", type=int, default=60, help="steps after the action (60)")
    parser.add_argument("--quick", action="store_true", help="20 steps after the action")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for arm in options.only or ARMS:
            folder = (options.keep or Path(temporary)) / arm.replace(" ", "-")
            folder.mkdir(parents=True)
            found[arm] = measure(arm, folder, factor=options.factor, num_steps=20 if options.quick else options.steps)
    _print(found)
    write_json(options.json, {"runs": found, "load": os.getloadavg()[0]})
    sys.exit(not all(_is_right(arm, values) for arm, values in found.items()))


def _is_right(arm: str, found: dict[str, Any]) -> bool:
    if arm == "dry run":
        events = (found["dry_runs"], found["excluded"])
        return bool(events == (1, 0) and found["attempts_after"] == 0 and found["restart_s"] == 0)
    expected = 2 if arm == "exclude" else found["before"]["world_size"]
    return bool(found["after"]["world_size"] == expected and found["after"]["step_ms"] < found["before"]["step_ms"])


def _print(found: dict[str, dict[str, Any]]) -> None:
    table = Table("run", "ranks", "ms per step", "tokens/s", "waiting", "restart", "paid off after")
    for arm, values in found.items():
        before, after, pays_s = values["before"], values["after"], values["pays_after_s"]
        table.add_row(
            arm, *(f"{before[name] * scale:,.0f} -> {after[name] * scale:,.0f}{unit}" for name, scale, unit in SHOWN),
            f"{values['restart_s']:.1f} s" if values["attempts_after"] else "none",
            "-" if pays_s is None else f"{pays_s:.0f} s",
        )  # fmt: skip
    Console(width=110).print(table)
    for arm, values in found.items():
        print(f"{arm}: {values['reason'].removeprefix('dry run: ')}")
    print(f"load {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
