"""Drills on third-party style loops: each fault in every loop of this folder, scored by what a user sees.

    python -m benchmarks.strangers                                       # all loops, all faults, two ranks
    python -m benchmarks.strangers --loops gan,compiled --faults kill,hang --ranks 4 --json strangers.json
    python -m benchmarks.strangers --faults slow --busy                  # with another process on every core

The loops contain no Rankscope code; `rankscope drill --script` injects the faults. A clean run of each loop counts
false alarms. A slowdown takes a share of a step (`--slow-ratio`), sleeping or computing, at each place of a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import argument_parser, write_json
from trainer.drills.script.drill import script_drill
from trainer.drills.script.execute import Plan
from trainer.drills.script.faults import SCRIPT_FAULTS, chosen_faults
from trainer.drills.script.score import ScriptRow

FOLDER = Path(__file__).parent
LOOPS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("__"))
NOT_INSPECTED = ("compiled", "gan", "lightning_fabric", "tensor_parallel", "huggingface_trainer", "pipeline_1f1b")
"""Loops whose results were not inspected during development."""


@contextmanager
def busy(on: bool) -> Iterator[None]:
    """Keep every core busy with another process."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"])
        for _ in range(len(os.sched_getaffinity(0)) if on else 0)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def print_table(rows: dict[str, list[ScriptRow]], console: Console) -> None:
    """One row per fault, one column per loop: right, or the error."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    table.add_column("fault", no_wrap=True)
    for loop in rows:
        table.add_column(f"{loop}{'*' if loop in NOT_INSPECTED else ''}")
    for name in dict.fromkeys(row.fault for found in rows.values() for row in found):
        cells = [next((_cell(row) for row in found if row.fault == name), "") for found in rows.values()]
        table.add_row(name, *cells)
    console.print(table)
    injected = [row for found in rows.values() for row in found if row.is_injected and SCRIPT_FAULTS[row.fault].kinds]
    alarms = [text for found in rows.values() for row in found for text in row.false_alarms]
    clean = sum(row.steps_after for found in rows.values() for row in found if row.fault == "none")
    console.print(f"{sum(row.is_right for row in injected)} of {len(injected)} faults right; *: not inspected before")
    console.print(f"{clean} clean steps; {len(alarms)} false alarms in all runs")
    for loop, found in rows.items():
        for row in found:
            if not row.is_right:
                texts = " | ".join(filter(None, (row.problem, row.summary, *row.false_alarms)))
                console.print(f"{loop} {row.fault}: {texts or 'nothing was found'}", markup=False, highlight=False)


def _cell(row: ScriptRow) -> str:
    if row.problem:
        return "failed"
    if not row.is_injected:
        return "-"
    if not SCRIPT_FAULTS[row.fault].kinds:
        return "silent" if not row.false_alarms else "alarm"
    if not row.seen:
        return "missed"
    wrong = [what for what in ("rank", "cause", "place", "step") if getattr(row, f"right_{what}") is False]
    return f"wrong {' '.join(wrong)}" if wrong else "right" if not row.false_alarms else "right + alarm"


def main() -> int:
    """Run the benchmark; return 1 if a fault was missed or a report was false."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--faults", default="all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow-ratio", type=float, default=0.3)
    parser.add_argument("--step", type=int, default=30, help="step at (or from) which a fault acts")
    parser.add_argument("--steps-after", type=int, default=120)
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    console, names = Console(width=200), chosen_faults(options.faults)
    rows: dict[str, list[ScriptRow]] = {}
    with busy(options.busy), tempfile.TemporaryDirectory(prefix="strangers-") as folder:
        for loop in options.loops.split(","):
            plan = Plan(
                words=(str(FOLDER / f"{loop}.py"),), num_ranks=options.ranks, step=options.step,
                steps_after=options.steps_after, limit_s=options.limit_s,
            )  # fmt: skip
            at, keep = (options.keep or Path(folder)) / loop, options.keep is not None
            for row in script_drill(plan, names, folder=at, keep=keep, slow_ratio=options.slow_ratio):
                rows.setdefault(loop, []).append(row)
                console.print(f"{loop} {row.fault}: {_cell(row)}, {row.wall_s:.0f} s", highlight=False)
            write_json(options.json, {name: [row.to_json() for row in found] for name, found in rows.items()})
    print_table(rows, console)
    return 0 if all(row.is_right for found in rows.values() for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
