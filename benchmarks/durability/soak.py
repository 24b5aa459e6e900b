"""Soak test: random faults in one run for a given time. Does it always recover, and does it learn?

    python -m benchmarks.durability.soak --minutes 60                  # 4 ranks of the demo's model, a fault every 20 s
    python -m benchmarks.durability.soak --minutes 3 --seed 7 --json soak.json
    python -m benchmarks.durability.soak --faults 10 --apart 12        # as many faults as in 3 minutes, in one
    python -m benchmarks.durability.soak --environments 60  # also a bad environment every minute; needs a C compiler

Faults are drawn by seed from the drill's catalogue (killed, stopped, hung, crashed, poisoned and slow ranks, bad
batches, a killed watch, a damaged store, ...). None is repeated before all have occurred. They are injected at steps
whose distance is `--every` seconds of clean training. All hit the same `rankscope train`, which gets SIGTERM at the end
of the time, as from a scheduler.

The value of a soak is the number of faults in one run, each on the state that the earlier ones have left, not the
healthy training in between. So `--faults` sets their number and `--apart` the steps between two; the run then ends by
itself some steps after the last.

| figure | meaning |
|---|---|
| wedged | periods longer than `--wedged-after` seconds (60) without a good step on any rank |
| seen, right rank | share of injected faults with a live finding within 45 s; share with the right rank |
| unexplained | live findings that no fault of the 45 s before explains |
| goodput | share of the wall time from first to last step spent in steps whose update is in the final state |
| batches | each batch up to the newest is trained into the final state exactly once, or skipped |
| loss | medians over the first and the last tenth of the steps in the final state |
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.durability.soak_environments import BadEnvironments
from benchmarks.harness import argument_parser, write_json
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.format.reader import TapeError, read_segment, segment_paths
from probes.tape.rundir import RunDir
from store import Store
from trainer.drills.execute import Base, Executed, execute
from trainer.drills.scenario import Scenario
from trainer.faults.catalogue import CATALOGUE
from trainer.faults.options import Fault, parse_fault

RANKS = 4
LEFT_OUT = (
    "failing_data", "divergence", "clock_shift", "missing_send", "kill_in_recovery", "failing_batch", "skip_restore",
    "torn_checkpoint", "flipped_checkpoint",
)  # fmt: skip
"""Faults that are not drawn: they end a run, need a pipeline or other settings, or are pairs."""
CLEAN_STEPS = 60
FIRST_STEP = 40
STEPS_AFTER = 20
"""Steps after the last fault if the number of faults is given."""
NAMED_WITHIN_S = 45.0


def kinds() -> list[str]:
    """All kinds that a soak draws from."""
    return [name for name in CATALOGUE if name not in LEFT_OUT]


def draw(seed: int, count: int, apart: int) -> list[Fault]:
    """`count` faults, `apart` steps from each other on average; faults with a duration last for a third of that."""
    dice, step, faults = random.Random(seed), FIRST_STEP, []
    left: list[str] = []
    for _ in range(count):
        left = left or dice.sample(kinds(), len(kinds()))
        name = left.pop()
        kind = CATALOGUE[name]
        rank = kind.drilled_rank if kind.drilled_rank >= 0 else dice.randrange(RANKS)
        parts = [f"step={step}"] + ([] if kind.all_ranks else [f"rank={rank}"])
        parts += [kind.parameters] if kind.parameters else []
        parts += [f"until={step + max(10, apart // 3)}"] if "until" in kind.keys else []
        faults.append(parse_fault(f"{name}@{','.join(parts)}"))
        step += max(5, round(apart * dice.uniform(0.6, 1.4)))
    return faults


def run(faults: list[Fault], steps: int, base: Base, folder: Path, limit_s: float) -> Executed:
    """Run one `rankscope train` with these faults, ended after `limit_s`."""
    settings = (
        f"train.steps={steps}", "recovery.max_restarts=100000", "recovery.max_rollbacks=100000",
        "recovery.max_corruptions_per_device=100000",
        "checkpoint.interval=50", "checkpoint.memory_interval=10",
        *sorted({setting for fault in faults for setting in CATALOGUE[fault.kind].settings}),
    )  # fmt: skip
    scenario = Scenario(
        name="soak", mesh="config", seed=0, kinds=tuple(CATALOGUE[f.kind] for f in faults), faults=tuple(faults),
        steps=steps, settings=settings,
    )  # fmt: skip
    return execute(scenario, base, folder, limit_s=limit_s)


def clean_step_s(base: Base, folder: Path) -> float:
    """Seconds of a step without faults: the median of the later half of a short run."""
    done = run([], CLEAN_STEPS, base, folder, 300.0)
    if done.run is None:
        raise SystemExit(f"benchmarks.durability.soak: the clean run failed: {done.problem}")
    with Store.open(done.run) as store:
        sql = f"SELECT median(duration_ns) / 1e9 AS s FROM steps WHERE step > {CLEAN_STEPS // 2}"
        return float(store.query(sql)["s"][0])


def judge(executed: Executed, wedged_after_s: float) -> dict[str, Any]:
    """Compute all figures from the run's files."""
    if executed.run is None:
        return {"problem": executed.problem}
    with Store.open(executed.run) as store:
        steps = store.query(
            "SELECT attempt, step, batch_index, loss, duration_ns, start_ns FROM steps "
            "WHERE committed AND rank = 0 AND duration_ns IS NOT NULL"
        )
        skipped = store.query(
            "SELECT CAST(json_extract_string(detail, '$.batch_index') AS BIGINT) AS batch FROM events "
            "WHERE kind = 'batch_skipped'"
        )["batch"]
        counts = store.query("SELECT kind, count(*) AS n FROM events GROUP BY kind")
    injected, live = faults_and_findings(executed.run)
    answers = match(injected, live)
    events = dict(zip(counts["kind"].tolist(), counts["n"].tolist(), strict=True))
    if not len(steps["step"]):
        return {"problem": f"no step was executed: {executed.problem}"}
    begun_ns = step_starts(executed.run)
    usual_ns = int(np.median([wall_ns - mono_ns for wall_ns, mono_ns in begun_ns.items()] or [0]))
    mono_ns = [begun_ns.get(start_ns, start_ns - usual_ns) for start_ns in steps["start_ns"].tolist()]
    steps = in_execution_order({**steps, "mono_ns": np.asarray(mono_ns)})
    final = {int(step): index for index, step in enumerate(steps["step"])}  # the last execution of each step
    order = [final[step] for step in sorted(final)]
    ends = (steps["mono_ns"] + steps["duration_ns"]) / 1e9
    gaps = np.diff(ends)
    loss = np.asarray(steps["loss"], dtype=np.float64)[order]
    tenth = max(1, len(loss) // 10)
    useful_s, span_s = float(steps["duration_ns"][order].sum()) / 1e9, float(ends.max() - steps["mono_ns"].min() / 1e9)
    return {
        "steps": len(order),
        "attempts": events.get("attempt_started", 0),
        "rollbacks": events.get("rollback", 0),
        "struck": len(injected),
        "wedged": int((gaps > wedged_after_s).sum()),
        "longest_gap_s": round(float(gaps.max(initial=0.0)), 1),
        **answers,
        "goodput": round(useful_s / span_s, 4),
        "batches": account(np.asarray(steps["batch_index"])[order].tolist(), [int(batch) for batch in skipped]),
        "loss_first": round(float(np.median(loss[:tenth])), 4) if len(loss) else None,
        "loss_last": round(float(np.median(loss[-tenth:])), 4) if len(loss) else None,
        "exit_code": executed.exit_code,
    }  # fmt: skip


def step_starts(run: RunDir) -> dict[int, int]:
    """{start of a step of rank 0 by the wall clock: by the monotonic clock}, both in ns.

    Read from the tapes, because the store uses one clock offset for all, and the wall clock may be set between a rank's
    first event and its tapes, or between two tapes.
    """
    found: dict[int, int] = {}
    for _, rank, folder in run.rank_dirs():
        if rank == 0:
            with contextlib.suppress(TapeError):
                offsets_ns = {read_segment(path, 0).header.wall_minus_mono_ns for path in folder.glob("*.tape")}
                for path in segment_paths(folder, "steps"):
                    for mono_ns in read_segment(path).records["start_ns"].tolist():
                        found |= {mono_ns + offset_ns: mono_ns for offset_ns in offsets_ns}
    return found


def in_execution_order(steps: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Steps in the order of execution: by attempt and monotonic time, since the wall clock may have been set."""
    order = np.lexsort((steps["mono_ns"], steps["attempt"]))
    return {name: np.asarray(values)[order] for name, values in steps.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """An injected fault; `rank` is the first one if it hits several."""

    fault: str
    rank: int
    mono_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFinding:
    """A live finding."""

    kind: str
    ranks: frozenset[int]
    summary: str
    mono_ns: int


def faults_and_findings(run: RunDir) -> tuple[list[InjectedFault], list[LiveFinding]]:
    """Injected faults and live findings in the order of the monotonic clock, since the wall clock is set during the
    run.
    """
    events = [event for path in run.event_files() if path.exists() for event in read_events(path)[0]]
    events.sort(key=lambda event: int(event["mono_ns"]))
    injected: dict[tuple[str, int], InjectedFault] = {}
    live = []
    for event in events:
        if event["kind"] == event_kinds.FAULT_INJECTED:
            at = event["fault"], event["step"]
            first = injected.get(at)
            rank = min(event["rank"], first.rank) if first else event["rank"]
            since_ns = first.mono_ns if first else event["mono_ns"]
            injected[at] = InjectedFault(fault=event["fault"], rank=rank, mono_ns=since_ns)
        elif event["kind"] == event_kinds.FINDING and event["status"] == "fired" and event["severity"] != "info":
            live.append(
                LiveFinding(
                    kind=event["finding_kind"],
                    ranks=frozenset(event["finding_ranks"]),
                    summary=event["summary"],
                    mono_ns=event["mono_ns"],
                )
            )
    return list(injected.values()), live


def match(injected: Sequence[InjectedFault], live: Sequence[LiveFinding]) -> dict[str, Any]:
    """Match faults with findings: which faults were found in time, and which findings no fault explains."""
    asked = seen = right_rank = 0
    explained: set[LiveFinding] = set()
    wrong = []
    for one in injected:
        in_time = [finding for finding in live if 0 <= finding.mono_ns - one.mono_ns < NAMED_WITHIN_S * 1e9]
        for wanted in CATALOGUE[one.fault].expected:
            asked += 1
            found = [finding for finding in in_time if finding.kind in wanted.kinds]
            names = [finding for finding in found if wanted.rank == "none" or one.rank in finding.ranks]
            explained |= set(found)
            seen += bool(found)
            right_rank += bool(names)
            if not names:
                wrong.append(f"{one.fault} on rank {one.rank}: " + (found[0].summary if found else "nothing"))
    unexplained = [finding.summary for finding in live if finding not in explained]
    return {"asked": asked, "seen": seen, "right_rank": right_rank, "not_right": wrong, "unexplained": unexplained}


def account(trained: list[int], skipped: list[int]) -> str:
    """`exact`, or the errors in the account of batches."""
    twice = [batch for batch, number in Counter([*trained, *skipped]).items() if number > 1]
    missing = sorted(set(range(max([*trained, *skipped], default=-1) + 1)) - {*trained, *skipped})
    if not twice and not missing:
        return "exact"
    return f"{len(twice)} more than once {twice[:5]}, {len(missing)} not at all {missing[:5]}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    base = Base(config=options.config, overrides=tuple(options.overrides), num_ranks=RANKS)
    found: dict[str, Any] = {"seed": options.seed}
    if options.faults:
        faults = draw(options.seed, options.faults, options.apart)
        steps, limit_s = faults[-1].step + STEPS_AFTER, options.faults * options.wedged_after
    else:
        step_s = clean_step_s(base, folder / "clean")
        apart = max(5, round(options.every / step_s))
        faults = draw(options.seed, round(options.minutes * 60 / options.every) + 1, apart)
        steps, limit_s = 10_000_000, options.minutes * 60
        print(f"a clean step takes {1e3 * step_s:.0f} ms; {len(faults)} faults, about {apart} steps apart", flush=True)
        found["step_ms"] = round(1e3 * step_s, 1)
    bad = BadEnvironments.under(folder, options.seed) if options.environments else None
    if bad is not None:
        base = replace(base, overrides=(*base.overrides, *bad.settings))
        bad.start(options.environments)
    start = time.monotonic()
    done = run(faults, steps, base, folder / "runs", limit_s)
    found["minutes"] = round((time.monotonic() - start) / 60, 1)
    if bad is not None:
        bad.stop()
        found["environments"] = dict(Counter(each["environment"] for each in bad.log))
    found |= judge(done, options.wedged_after)
    for key, value in found.items():
        if isinstance(value, list):
            print(f"{key:14} {len(value)}")
            print("".join(f"    {line}\n" for line in value), end="")
        else:
            print(f"{key:14} {value}")
    write_json(options.json, found)
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    falls = found.get("loss_last") is not None and found["loss_last"] < found["loss_first"]
    return int(bool(found.get("problem")) or found["wedged"] > 0 or found["batches"] != "exact" or not falls)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0, metavar="SECONDS", help="distance of faults")
    parser.add_argument("--faults", type=int, default=0, metavar="N", help="end after this many faults, not --minutes")
    parser.add_argument("--apart", type=int, default=50, metavar="STEPS", help="with --faults: distance")
    parser.add_argument(
        "--environments", type=float, default=0.0, metavar="SECONDS", help="from one to the next; 0: none"
    )
    parser.add_argument("--wedged-after", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--config", type=Path, default=Path("examples/gpt-demo.toml"))
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
