"""Detection of slow places in foreign training loops: all places in one run per loop, and clean steps judged live.

    python -m benchmarks.accuracy.places                                         # twelve loops, two ranks, 10 ms
    python -m benchmarks.accuracy.places --loops gan,compiled --ranks 4 --delay-ms 20 --rounds 3 --busy
    python -m benchmarks.accuracy.places --clean-steps 2000 --faults none        # false alarms only

The delays of `rankscope drill --script` follow one another, each after a calm window. Each slow window is judged
together with the calm window before it, as if the run had begun there and were still running; rank, cause and place
must be right. Calm steps are judged every `--every` steps over at most `--window` steps, as `watch` does; any report
there is a false alarm. In a run without delays every finding is a false alarm, live or of the whole run. With a single
launch, a hundred places take as long as one drill.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from analyzers.account.timings import Timings, load_timings
from analyzers.finding import Finding
from analyzers.run.records.event_log import EventLog
from analyzers.stragglers.analyze import slow_ranks
from analyzers.stragglers.policy import StragglerPolicy
from benchmarks.harness import argument_parser, write_json
from benchmarks.strangers.__main__ import FOLDER, LOOPS, busy
from probes.attach.injected_fault import InjectedFault
from probes.tape import event_kinds
from store import Store
from trainer.drills.script.execute import Plan, execute
from trainer.drills.script.faults import SCRIPT_FAULTS, chosen_faults
from trainer.drills.script.score import score

FIRST = 20
SLOW_RANK = 1
NUM_COLLECTIONS = 20
"""Slow steps of the fault `garbage`: fewer than of others, since each collection takes at least a tenth of a second."""
ENDLESS = dict.fromkeys(("STEPS", "MAX_ITERS", "EPOCHS"), "1000000")
"""Environment variables that set how long the loops train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One slow window of one loop, and its reports. `step_ms`: duration of the calm steps before it."""

    loop: str
    fault: str
    first_step: int
    step_ms: float
    result: str
    after_steps: int | None
    """Slow steps after which it is first reported correctly, in units of five."""
    summaries: tuple[str, ...]


def part(timings: Timings, begin: int, end: int) -> Timings:
    """Observations with begin <= i < end."""
    own = {name: values[:, begin:end] for name, values in timings.own.items()}
    wait, duration = timings.wait[:, begin:end], timings.duration[:, begin:end]
    return replace(timings, steps=timings.steps[begin:end], own=own, wait=wait, duration=duration)


def windows(names: Sequence[str], rounds: int, calm: int, slow: int, delay_s: float) -> list[InjectedFault]:
    """Faults one after another, with `calm` steps before each."""
    faults, step = [], FIRST
    for name in list(names) * rounds:
        begin, step = step + calm, step + calm + (NUM_COLLECTIONS if name == "garbage" else slow)
        until = step - 1
        faults.append(InjectedFault(name=name, step=begin, rank=SLOW_RANK, seconds=delay_s, lasts=True, until=until))
    return faults


def judge(loop: str, fault: InjectedFault, timings: Timings, store: Store, calm: int) -> Window:
    """Judge a slow window at its end; if that is right, also find after how many slow steps it is first right."""
    policy = StragglerPolicy()
    begin, start, end = np.searchsorted(timings.steps, [fault.step - calm, fault.step, fault.until])
    calm_ms = float(np.median(np.nanmedian(timings.duration[:, begin:start], axis=0)))

    def answer(last: int) -> tuple[str, list[Finding]]:
        found = slow_ranks(store, part(timings, int(begin), int(last)), policy)[0]
        return _result(fault.name, found), found

    result, found = answer(int(end))
    after = None
    if result == "right":
        ends = [last for last in range(int(end), int(start), -5) if answer(last)[0] == "right"]
        after = min(ends) - int(start)
    return Window(
        loop=loop, fault=fault.name, first_step=fault.step, step_ms=round(calm_ms, 2), result=result, after_steps=after,
        summaries=() if result == "right" else tuple(one.summary for one in found),
    )  # fmt: skip


def _result(name: str, found: Sequence[Finding]) -> str:
    wanted = SCRIPT_FAULTS[name]
    if not found:
        return "missed"
    if len(found) > 1 or found[0].ranks != (SLOW_RANK,):
        return "wrong rank"
    if found[0].cause not in wanted.causes:
        return "wrong cause"
    return "right" if found[0].evidence.get("place") in wanted.places else "wrong place"


def false_alarms(timings: Timings, store: Store, begin: int, every: int, window: int) -> Iterator[str]:
    """Reports in calm observations from `begin` on."""
    for last in range(begin + every, len(timings.steps) + 1, every):
        for found in slow_ranks(store, part(timings, max(begin, last - window), last), StragglerPolicy())[0]:
            if found.evidence.get("ongoing", True):
                yield found.summary


def run(
    loop: str, names: Sequence[str], options: argparse.Namespace, folder: Path
) -> tuple[list[Window], dict[str, object]]:
    """Train one loop through all windows, then through clean steps."""
    script = FOLDER / f"{loop}.py" if (FOLDER / f"{loop}.py").exists() else Path(loop)
    faults = windows(names, options.rounds, options.calm, options.slow, options.delay_ms / 1e3)
    end = faults[-1].until if faults else FIRST
    plan = Plan(
        words=(str(script),), num_ranks=options.ranks, step=end, steps_after=options.clean_steps + 20,
        limit_s=options.limit_s,
    )  # fmt: skip
    done = execute(plan, faults, folder)
    with Store.open(done.run, include_newest=True) as store:
        timings = load_timings(store, 0, skip_first=5)
        if timings is None:
            return [], {"loop": loop, "problem": done.problem or "no steps"}
        events = EventLog.load(store, (event_kinds.FAULT_INJECTED,)).of(event_kinds.FAULT_INJECTED)
        injected = {event.text("fault") for event in events}
        whole = [fault for fault in faults if fault.name in injected and fault.until < timings.steps[-1]]
        found = [judge(loop, fault, timings, store, options.calm) for fault in whole]
        begin = int(np.searchsorted(timings.steps, end + 1))
        alarms = list(dict.fromkeys(false_alarms(timings, store, begin, options.every, options.window)))
    if not faults:  # all findings of any kind, live or of the whole run
        alarms += [text for text in score(None, done).false_alarms if text not in alarms]
    clean = {"loop": loop, "clean_steps": len(timings.steps) - begin, "alarms": alarms, "problem": done.problem}
    return found, clean


def main() -> int:
    """Run the benchmark; return 1 if a loop failed, a window was judged wrongly, or a calm step was reported."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--faults", default="slow")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--delay-ms", type=float, default=10.0)
    parser.add_argument("--calm", type=int, default=60)
    parser.add_argument("--slow", type=int, default=80)
    parser.add_argument("--clean-steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--window", type=int, default=500)
    parser.add_argument("--limit-s", type=float, default=500.0)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    names = [] if options.faults == "none" else chosen_faults(options.faults)
    console, rows, clean = Console(width=200), [], []
    os.environ.update(ENDLESS)
    with busy(options.busy), tempfile.TemporaryDirectory(prefix="places-") as folder:
        for loop in options.loops.split(","):
            at = (options.keep or Path(folder)) / Path(loop).stem
            found, calm = run(loop, names, options, at)
            rows, clean = rows + found, [*clean, calm]
            for row in found:
                detail = f"after {row.after_steps} steps" if row.result == "right" else " | ".join(row.summaries)
                console.print(f"{loop} {row.fault} ({row.step_ms} ms): {row.result} {detail}", highlight=False)
            console.print(str(calm), highlight=False, markup=False)
            write_json(options.json, {"windows": [asdict(row) for row in rows], "clean": clean})
            if options.keep is None:
                shutil.rmtree(at, ignore_errors=True)
    right = sum(row.result == "right" for row in rows)
    alarms = sum(len(one.get("alarms", ())) for one in clean)
    steps = sum(one.get("clean_steps", 0) for one in clean)
    console.print(f"{right} of {len(rows)} slow windows right; {alarms} false alarms in {steps} clean steps")
    failed = [one["loop"] for one in clean if one["problem"]]
    if failed:
        console.print(f"not measured completely: {', '.join(map(str, failed))}")
    return 0 if right == len(rows) and not alarms and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
