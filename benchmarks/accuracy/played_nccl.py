"""Diagnosis of simulated GPU and link faults, end to end: virtual devices with the real recorder, plugin, tapes, store
and analyzers.

    python -m benchmarks.accuracy.played_nccl --seeds 1 --clean 4              # a short run
    python -m benchmarks.accuracy.played_nccl --seeds 5 --clean 100 --keep outcomes.jsonl --json played.json
    python -m benchmarks.accuracy.played_nccl --fault slow_link --layout ddp --seeds 3 --verbose

Each run trains eight ranks on two nodes (four, for the pipeline) on a virtual clock (`tests.support.played`). A row
is a kind of fault:

| column | meaning |
|---|---|
| kind | runs with a fired finding of the expected kind |
| rank | ... that names the rank, or both ends of the link |
| cause | ... and gives the cause |
| wrong | runs with a fired finding about something else |

Below the table, one line per layout is about profiled steps: the largest difference between trace and truth in exposed
communication and in own work, over all ranks and runs. Runs that the file of `--keep` already has are skipped.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from analyzers.diagnose import diagnose
from analyzers.finding import Finding
from benchmarks.harness import argument_parser, write_json
from store import Store
from tests.support.played.faults import EXPECTED, Fault, draw
from tests.support.played.host_time import PlayedClock, build
from tests.support.played.programs import LAYOUTS, Job
from tests.support.played.recording import Played, play
from tests.support.played.traces import compare_traces

JOB = Job(layers=4, microbatches=4)
STEPS = 48
STEPS_OF = {"slow_link": 96}
"""A link that can only be compared with its own past has to be slow for `SlowLinkPolicy.min_rise_s` (80 ms a step)."""
CLEAN = "clean"
ALARMS = ("hang", "straggler", "rank_lost", "xid", "gpu_memory_errors", "gpu_throttled", "link_errors", "throughput")
"""Kinds of findings about problems."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of one run."""

    fault: str
    layout: str
    seed: int
    kind: bool = False
    rank: bool = False
    cause: bool = False
    wrong: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    exposed_points: float | None = None
    """Largest error of the exposed share of a rank's steps, in percentage points."""
    own_ratio: float | None = None
    """Largest relative error of a rank's own work."""
    error: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """True if all results are as expected."""
        return not self.wrong and not self.error and (self.fault == CLEAN or self.cause)


def judge(case: tuple[str, str, int], built: Path | None = None) -> Outcome:
    """Simulate, ingest, diagnose and compare. `built`: the folder of the compiled plugin."""
    name, layout, seed = case
    outcome = Outcome(fault=name, layout=layout, seed=seed)
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="played-"))
    try:
        library = build(built or folder)
        fault = None if name == CLEAN else draw(name, LAYOUTS[layout], seed)
        clock = PlayedClock(built or folder)
        played = play(
            layout, steps=STEPS_OF.get(name, STEPS), seed=seed, fault=fault, folder=folder, library=library,
            clock=clock, job=JOB,
        )  # fmt: skip
        _compare(outcome, _diagnosed(played), fault)
        if fault is None:
            outcome.exposed_points, outcome.own_ratio = compare_traces(played, folder / "traces")
    except Exception as error:  # a run that cannot be diagnosed is a result, too
        outcome.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _diagnosed(played: Played) -> list[Finding]:
    with Store.open(played.run) as store:
        return list(diagnose(store, played.run.manifest()).findings)


def _compare(outcome: Outcome, findings: Sequence[Finding], fault: Fault | None) -> None:
    fired = [finding for finding in findings if finding.status == "fired"]
    outcome.found = [f"{f.kind}/{f.cause} {list(f.ranks)}: {f.summary}" for f in fired]
    expected = EXPECTED[outcome.fault] if fault else None
    named = []
    if fault is not None and expected is not None:
        of_kind = [finding for finding in fired if finding.kind == expected.kind]
        named = [finding for finding in of_kind if _names(finding, fault)]
        outcome.kind, outcome.rank = bool(of_kind), bool(named)
        outcome.cause = any(finding.cause in expected.causes for finding in named)
    also = expected.also if expected else ()
    outcome.wrong = [
        f"{f.kind}/{f.cause} {list(f.ranks)}"
        for f in fired
        if f.kind in ALARMS and f not in named and f.kind not in also
    ]


def _names(finding: Finding, fault: Fault) -> bool:
    match EXPECTED[fault.kind].names:
        case "pair":
            return set(finding.ranks) == {fault.rank, fault.peer}
        case "link":
            evidence = finding.evidence
            is_message = evidence.get("op") in ("send", "recv")  # a message uses a separate channel
            is_channel = is_message or evidence.get("link_channel", fault.channel) == fault.channel
            return set(finding.ranks) == {fault.rank, fault.peer} and is_channel
        case "side":
            return fault.rank in finding.ranks and len(finding.ranks) <= 2
        case _:
            return finding.ranks == (fault.rank,)


def cases_of(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """All runs, in an order in which any first part is a fair sample."""
    faults = options.fault or list(EXPECTED)
    layouts = options.layout or [name for name, layout in LAYOUTS.items() if layout.ranks_per_device == 1]
    cases = [(name, layout, seed) for seed in range(options.seeds) for name in faults for layout in layouts]
    clean = [(CLEAN, layouts[i % len(layouts)], i // len(layouts)) for i in range(options.clean)]
    return [*cases, *clean]


def judged(cases: Sequence[tuple[str, str, int]], jobs: int) -> Iterator[Outcome]:
    """Yield outcomes as they complete. Each run has a separate process, because a plugin stays loaded until its process
    ends.

    The plugin is compiled once, and not loaded in this process.
    """
    with tempfile.TemporaryDirectory(prefix="played-plugin-") as name:
        build(Path(name))
        with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
            yield from pool.imap_unordered(functools.partial(judge, built=Path(name)), cases)


def table_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Counts by fault."""
    rows = []
    for name in (*EXPECTED, CLEAN):
        runs = [outcome for outcome in outcomes if outcome.fault == name]
        if runs:
            counts = {key: sum(getattr(o, key) for o in runs) for key in ("kind", "rank", "cause")}
            alarmed = sum(bool(o.wrong) for o in runs)
            rows.append(
                {
                    "fault": name,
                    "runs": len(runs),
                    **counts,
                    "wrong": alarmed,
                    "errors": sum(bool(o.error) for o in runs),
                }
            )
    return rows


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    print(f"{'fault':14} {'runs':>4} {'kind':>4} {'rank':>4} {'cause':>5} {'wrong':>5}")
    for row in table_of(outcomes):
        is_clean = row["fault"] == CLEAN
        counts = " ".join(
            f"{'' if is_clean and key != 'wrong' else row[key]:>{len(key)}}"
            for key in ("kind", "rank", "cause", "wrong")
        )
        print(f"{row['fault']:14} {row['runs']:4} {counts}" + (f"  {row['errors']} errors" if row["errors"] else ""))
    for layout in LAYOUTS:
        profiled = [
            o for o in outcomes if o.layout == layout and o.exposed_points is not None and o.own_ratio is not None
        ]
        if profiled:
            points = max(o.exposed_points or 0.0 for o in profiled)
            own = max(o.own_ratio or 0.0 for o in profiled)
            within = f"exposed within {points:.2f} points, own work within {100 * own:.2f} %"
            print(f"profiled {layout:6} {within}, {len(profiled)} runs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the runs; return 1 if any was judged wrongly."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each fault and layout")
    parser.add_argument("--clean", type=int, default=4, help="runs without a fault")
    parser.add_argument("--fault", action="append", choices=list(EXPECTED), help="these only")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS), help="these only")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep", type=Path, help="file of outcomes; runs that it has are skipped")
    parser.add_argument("--verbose", action="store_true", help="print the findings of every run")
    options = parser.parse_args(arguments)
    outcomes = []
    if options.keep and options.keep.exists():
        outcomes = [Outcome(**json.loads(line)) for line in options.keep.read_text().splitlines()]
    known = {(o.fault, o.layout, o.seed) for o in outcomes}
    for outcome in judged([case for case in cases_of(options) if case not in known], options.jobs):
        outcomes.append(outcome)
        if options.keep:
            with options.keep.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        if options.verbose or not outcome.is_right:
            mark = "" if outcome.is_right else " WRONG"
            print(f"{outcome.fault} {outcome.layout} seed {outcome.seed}{mark} {outcome.error}")
            for text in outcome.found:
                print(f"    {text}")
            sys.stdout.flush()
    print_table(outcomes)
    write_json(options.json, table_of(outcomes))
    return int(not all(outcome.is_right for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
