"""Error of the what-if analysis: step times without a slowdown, predicted from a real run and measured in the same run.

    python -m benchmarks.accuracy.whatif  # 4 ranks, DDP, slow_compute x 1.5, 4 pairs of blocks
    python -m benchmarks.accuracy.whatif --kind slow_data --layout fsdp --blocks 6
    python -m benchmarks.accuracy.whatif --quick
    python -m benchmarks.accuracy.whatif --published StragglerAnalysis/data     # exit code 1 beyond 2 %

Blocks of steps with and without the fault alternate in one run, so that other load on the machine affects both.
`analyzers.whatif.what_if` predicts the step time without the fault from the records of one slow block; the mean of the
blocks before and after it is the measured time. The error is predicted / measured - 1.

With more ranks than cores, a rank that computes less leaves CPU time to the others, which then run faster. A replay
cannot predict that. `slow_data` sleeps and uses no CPU.

`--published`: ByteDance publishes the operations of three jobs (`trace-*.parquet`) with their slowdown S
(`result-*.json`), which is compared with that of `analyzers.whatif.pipeline_jobs`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from analyzers.account.timings import load_places
from analyzers.whatif.pipeline_jobs import what_if_of_operations
from analyzers.whatif.step_graph import load_graph
from analyzers.whatif.what_if import without
from benchmarks.accuracy.false_alarms import LAYOUTS
from benchmarks.harness import argument_parser, markdown_head, markdown_row, write_json
from probes.tape.rundir import RunDir
from store import Store
from store.readers.operations import read_operations

WARM_UP_STEPS = 20
MAX_PUBLISHED_RATIO = 0.02
EDGE_STEPS = 2
"""Steps skipped at the start of a block, because the fault starts in the middle of the first one."""
MODEL = ("model.dim=96", "model.num_layers=4", "model.num_heads=4", "data.seq_len=96", "train.global_batch_size=16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block with the fault, milliseconds per step. `measured_ms` is the mean of the adjacent blocks."""

    first_step: int
    slow_ms: float
    predicted_ms: float
    measured_ms: float
    before_ms: float
    after_ms: float
    basis: str
    replay_error_ratio: float

    @property
    def error_ratio(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def drift_ratio(self) -> float:
        """Relative difference of the adjacent blocks: the machine's variation."""
        return self.after_ms / self.before_ms - 1


def train(options: argparse.Namespace, folder: Path) -> RunDir:
    """Train with the fault in every second block. Raises RuntimeError if the run fails."""
    ranks, mesh = LAYOUTS[options.layout]
    total = WARM_UP_STEPS + (2 * options.blocks + 1) * options.steps
    settings = [
        *MODEL, *(f"parallel.{setting}" for setting in mesh), f"train.steps={total}", f"run.seed={options.seed}",
        f"run.dir={folder}", "run.name=whatif", f"checkpoint.interval={10 * total}",
        f"checkpoint.memory_interval={10 * total}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rankscope", "train", "--nproc-per-node", str(ranks)]
    command += [text for setting in settings for text in ("--set", setting)]
    for first in slow_blocks(options):
        until = first + options.steps - 1
        fault = f"{options.kind}@step={first},until={until},rank={options.rank},factor={options.factor}"
        command += ["--fault", fault]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
    return RunDir.open(folder / "latest")


def slow_blocks(options: argparse.Namespace) -> list[int]:
    """First steps of the blocks with the fault."""
    return [WARM_UP_STEPS + 1 + (2 * number + 1) * options.steps for number in range(options.blocks)]


def compare(store: Store, options: argparse.Namespace) -> list[Block]:
    """Predict and measure each block; blocks without enough records are skipped."""
    stage, _ = load_places(store, 0)
    peers = [rank for rank in stage if stage[rank] == stage[options.rank]]
    found = []
    for first in slow_blocks(options):
        graph = load_graph(store, 0, first + EDGE_STEPS, first + options.steps - 1)
        if graph is None:
            continue
        before = _mean_ms(store, first - options.steps + EDGE_STEPS, first - 1)
        after = _mean_ms(store, first + options.steps + EDGE_STEPS, first + 2 * options.steps - 1)
        found.append(
            Block(
                first_step=first,
                slow_ms=graph.measured_ms,
                predicted_ms=without(graph, [options.rank], {options.rank: peers}),
                measured_ms=(before + after) / 2,
                before_ms=before,
                after_ms=after,
                basis=graph.basis,
                replay_error_ratio=graph.error_ratio,
            )
        )
    return found


def _mean_ms(store: Store, first: int, last: int) -> float:
    """Mean step time from the start of the first to the end of the last step; median over the ranks."""
    ((took,),) = store.rows(
        "SELECT median(took) FROM (SELECT (max(start_ns + duration_ns) - min(start_ns)) / 1e6 AS took FROM steps "
        "WHERE step BETWEEN ? AND ? GROUP BY rank)",
        [first, last],
    )
    return float(took) / (last - first + 1)


def compare_published(folder: Path) -> int:
    """Print the published and the computed slowdown S of each job; return 1 if one differs by more than
    `MAX_PUBLISHED_RATIO`.
    """
    worst = 0.0
    print(markdown_head("job", "S: Rankscope", "published", "difference"))
    for path in sorted(folder.glob("trace-*.parquet")):
        slowdown = what_if_of_operations(read_operations(path)).slowdown
        result = path.with_name(f"result-{path.stem.removeprefix('trace-')}.json")
        published = float(json.loads(result.read_text(encoding="utf-8"))["blocking_slowdown"])
        difference = slowdown / published - 1
        worst = max(worst, abs(difference))
        print(markdown_row(path.stem, f"{slowdown:.3f}", f"{published:.3f}", f"{100 * difference:+.2f} %"), flush=True)
    return int(worst > MAX_PUBLISHED_RATIO)


def print_table(blocks: Sequence[Block]) -> None:
    """Print every block, then the mean error with its interval."""
    print(f"{'from step':>9} {'slow':>9} {'predicted':>9} {'measured':>9} {'error':>8} {'drift':>8}  basis")
    for block in blocks:
        print(
            f"{block.first_step:9} {block.slow_ms:6.1f} ms {block.predicted_ms:6.1f} ms {block.measured_ms:6.1f} ms "
            f"{100 * block.error_ratio:+6.1f} % {100 * block.drift_ratio:+6.1f} %  {block.basis}"
        )
    ratio = sum(block.predicted_ms for block in blocks) / sum(block.measured_ms for block in blocks)
    errors = np.array([block.error_ratio for block in blocks])
    half = 1.96 * float(errors.std(ddof=1)) / np.sqrt(len(errors)) if len(errors) > 1 else float("nan")
    factor = sum(block.slow_ms for block in blocks) / sum(block.measured_ms for block in blocks)
    print(f"all blocks: {100 * (ratio - 1):+.1f} % (95 %: +- {100 * half:.1f}); slow steps take {factor:.2f}x")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; drift: the block after against the one before")


def main() -> int:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--kind", choices=("slow_compute", "slow_data"), default="slow_compute")
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--rank", type=int, default=1, help="the slow rank (1)")
    parser.add_argument("--factor", type=float, default=1.5, help="slowdown factor of the fault (1.5)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks with the fault (4)")
    parser.add_argument("--steps", type=int, default=40, help="steps in a block (40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 blocks of 25 steps")
    parser.add_argument("--published", type=Path, help="folder of published jobs with their slowdowns")
    options = parser.parse_args()
    if options.published:
        return compare_published(options.published)
    if options.quick:
        options.blocks, options.steps = 2, 25
    folder = Path(tempfile.mkdtemp(prefix="whatif-"))
    try:
        with Store.open(train(options, folder)) as store:
            blocks = compare(store, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not blocks:
        print("no block was recorded completely", file=sys.stderr)
        return 1
    print_table(blocks)
    figures = [asdict(block) | {"error_ratio": block.error_ratio} for block in blocks]
    write_json(options.json, {"blocks": figures, "load": os.getloadavg()[0]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
