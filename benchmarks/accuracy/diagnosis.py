"""Accuracy of the analyzers: labelled faulty and clean simulated runs, through the store and `diagnose`.

    python -m benchmarks.accuracy.diagnosis --quick                       # one run a fault, under a minute
    python -m benchmarks.accuracy.diagnosis --faulty 500 --clean 500 --keep outcomes.jsonl --json diagnosis.json
    python -m benchmarks.accuracy.diagnosis --device cuda --faulty 400 --clean 100
    python -m benchmarks.accuracy.diagnosis --fault slow_compute_5 --runs 20 --ranks 64 --seed 7 --verbose

Each run is simulated (`tests.support.simulator`), written as tapes, ingested into a store and diagnosed like any run on
disk. `benchmarks.accuracy.labelled` has the expected findings of each fault.

| column | meaning |
|---|---|
| seen | runs with any fired finding, or with advice on a stage imbalance (if no other split of the layers is better) |
| kind, rank, cause | runs in which a fired finding has the expected kind; also names the rank; also gives the cause |
| place | for runs that are slow between phases: the finding names the gap |
| among | runs in which a finding of the kind names a group that includes the rank; does not count as `rank` |
| suspect | runs in which a finding of the kind says that the rank is unknown; not fired, so does not count as `kind` |
| wrong | fired findings that are not about the fault, or name another rank |
| steps | steps from onset to detection: median and 90th percentile of the shortest prefix of the run that shows it |

With `--keep` each outcome is appended to a file, and runs that it already has are skipped, so the benchmark can be
stopped and resumed. Whole runs are diagnosed in full; on prefixes only the analyzer for the fault runs.

Intervals are 95 % Wilson intervals. A fault without an analyzer is listed as `not offered` and not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.finding import Finding
from analyzers.numerics.nonfinite import WITHIN_GROUP
from analyzers.policy import SHARED
from analyzers.scope import Scope
from benchmarks.accuracy.diagnosis_summary import Outcome, analyses_of, offered, print_table, summarize
from benchmarks.accuracy.labelled import EXPECTED, Case, Expected, make
from benchmarks.harness import argument_parser, write_json
from probes.tape.rundir import RunDir
from store import Store
from tests.support.simulator import simulate, write

PREFIXES = (3, 5, 10, 15, 20, 40, 80, 120, 200)
"""Steps after the onset at which a run is cut, to find the first prefix that is diagnosed."""
MAX_PREFIX_RANKS = 128
"""Larger runs are only diagnosed as a whole: writing their prefixes takes minutes."""
ALARMS = frozenset(kind for expected in EXPECTED.values() for kind in expected.kinds)
"""Kinds of findings about problems: on a clean run they are false alarms. Other analyzers (bubble, communication,
goodput, ...) report measurements, which are counted by kind and are not alarms."""
_MEASURES = ("bubble",)


def judge(case: Case) -> Outcome:
    """Simulate, write, ingest, diagnose and compare."""
    warnings.simplefilter("ignore", RuntimeWarning)
    start = time.perf_counter()
    expected = EXPECTED[case.fault]
    scenario, truth = make(case)
    onset = scenario.fault.step if scenario.fault else 0
    outcome = Outcome(
        fault=case.fault, seed=case.seed, index=case.index, device=case.device, layout=scenario.layout.name,
        num_ranks=scenario.layout.num_ranks, truth_ranks=truth, onset=onset,
        ending=scenario.fault.ending if scenario.fault and not expected.steps else "",
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="diagnosis-"))
    try:
        recording = simulate(scenario)
        run = write(recording, folder / "whole")
        diagnosis, outcome.diagnose_s = _diagnosed(run.path)
        _compare(outcome, expected, diagnosis.findings, truth)
        outcome.contradiction = contradiction(diagnosis)
        has_prefixes = case.with_prefixes and outcome.num_ranks <= MAX_PREFIX_RANKS
        if expected.steps and outcome.kind and outcome.rank and has_prefixes:
            outcome.steps = _steps_to_detection(recording, expected, truth, onset, folder)
    except Exception as error:  # failing to diagnose a run is a result, too
        outcome.error = f"{type(error).__name__}: {error}"[:500]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.perf_counter() - start
    return outcome


def contradiction(diagnosis: Diagnosis) -> str:
    """A verdict without problems although balanced ranks would be faster, beyond the error; empty if there is none."""
    gain = diagnosis.what_if
    if gain is None or not gain.is_beyond_error or gain.gain < 1 + SHARED.min_gain_ratio:
        return ""
    is_clean = diagnosis.verdict.startswith("No problems found")
    omits_gain = not diagnosis.fired and "Balanced ranks" not in diagnosis.verdict
    return f"{gain.gain:.3f}x (error {gain.error_ratio:.3f}): {diagnosis.verdict}" if is_clean or omits_gain else ""


def _diagnosed(path: Path) -> tuple[Diagnosis, float]:
    run = RunDir.open(path)
    with Store.open(run) as store:
        start = time.perf_counter()
        diagnosis = diagnose(store, run.manifest(), stacks_dir=run.stacks)
        return diagnosis, time.perf_counter() - start


def _compare(outcome: Outcome, expected: Expected, findings: Sequence[Finding], truth: Sequence[int]) -> None:
    fired = [
        finding
        for finding in findings
        if finding.status == "fired" or (finding.status == "advice" and finding.kind == "stage_imbalance")
    ]
    outcome.findings = [
        {key: value for key, value in finding.to_json().items() if key in _REPORTED_FIELDS} for finding in findings
        if finding.status in ("fired", "suspect", "insufficient_data")
    ]  # fmt: skip
    outcome.insufficient = any(f.status == "insufficient_data" and f.kind == expected.insufficient for f in findings)
    alarms = [finding for finding in fired if finding.kind in ALARMS and finding.kind not in _MEASURES]
    outcome.seen = bool(alarms) or any(finding.kind in expected.kinds for finding in fired)
    of_kind = [finding for finding in fired if finding.kind in expected.kinds]
    named = [finding for finding in of_kind if _names(expected, finding, truth)]
    outcome.kind, outcome.rank = bool(of_kind), bool(named)
    outcome.cause = any(not expected.causes or finding.cause in expected.causes for finding in named)
    outcome.place = any(not expected.places or finding.evidence.get("place") in expected.places for finding in named)
    among = [
        f for f in of_kind
        if f not in named and f.evidence.get("named_by") == WITHIN_GROUP and set(truth) <= set(f.ranks)
    ]  # fmt: skip
    outcome.right, outcome.among = len(named), bool(among) and not named
    outcome.suspect = not of_kind and any(f.status == "suspect" and f.kind in expected.kinds for f in findings)
    wrong = [f for f in alarms if f not in named and f not in among and f.kind not in expected.also]
    outcome.wrong, outcome.wrong_kinds = len(wrong), [f"{f.kind}/{f.cause} {list(f.ranks)[:6]}" for f in wrong]


_REPORTED_FIELDS = ("analyzer", "kind", "severity", "status", "ranks", "first_step", "last_step", "cause", "summary")


def _names(expected: Expected, finding: Finding, truth: Sequence[int]) -> bool:
    found, true = set(finding.ranks), set(truth)
    match expected.ranks:
        case "one":
            return found == true
        case "members":  # a pair, a group or a node: no rank outside may be named
            return bool(found & true) and (found <= true or true <= found)
        case "no rank":
            return not found or found == true
        case "side":
            return found >= true and len(found) <= 2
        case _:
            return True


def _steps_to_detection(
    recording: Any, expected: Expected, truth: Sequence[int], onset: int, folder: Path
) -> int | None:
    """Length of the shortest prefix that is diagnosed, by bisection over `PREFIXES`."""
    last = recording.scenario.steps
    prefixes = [n for n in PREFIXES if onset + n - 1 < last]
    analyses = analyses_of(expected)

    def is_seen(number: int) -> bool:
        path = folder / f"prefix-{number}"
        run = write(recording, path, until_step=onset + prefixes[number] - 1)
        with Store.open(run) as store:
            findings = [finding for one in analyses for finding in one.run(store, Scope(manifest=run.manifest()))]
        return any(f.status == "fired" and f.kind in expected.kinds and _names(expected, f, truth) for f in findings)

    low, high = 0, len(prefixes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_seen(middle) else (middle + 1, high)
    return prefixes[low] if low < len(prefixes) else last - onset + 1


def print_mistake(outcome: Outcome) -> None:
    """Print the mistakes of a run with the options that reproduce it; print nothing if there are none."""
    o, expected = outcome, EXPECTED[outcome.fault]
    named = expected.is_clean or (o.cause and o.place)
    good = named and not (o.wrong or o.error or o.contradiction) and (not expected.insufficient or o.insufficient)
    if good or not offered(expected):
        return
    reproduce = f"--device {o.device} --fault {o.fault} --index {o.index} --seed {o.seed} --ranks {o.num_ranks}"
    print(f"\n{o.fault} on {o.layout}, ranks {o.truth_ranks[:8]} from step {o.onset} {o.ending}: {reproduce}")
    if o.contradiction:
        print(f"    contradiction: {o.contradiction}")
    if o.error:
        print(f"    {o.error}")
    for finding in o.findings:
        where = f"ranks {finding['ranks'][:8]} steps {finding['first_step']}-{finding['last_step']}"
        print(f"    {finding['status']} {finding['kind']}/{finding['cause']} {where}: {finding['summary'][:150]}")
    sys.stdout.flush()


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases to run."""
    common: dict[str, Any] = {
        "seed": options.seed,
        "ranks": options.ranks,
        "with_prefixes": not (options.whole or options.quick),
        "device": options.device,
    }
    if options.fault:
        indices = [options.index] if options.index is not None else range(options.runs)
        return [Case(fault=name, index=i, **common) for name in options.fault for i in indices]
    faulty = [name for name, expected in EXPECTED.items() if not expected.is_clean]
    clean = [name for name, expected in EXPECTED.items() if expected.is_clean]
    if options.quick:
        chosen = [name for name in faulty if offered(EXPECTED[name])]
        common["ranks"] = common["ranks"] or 8
        return [Case(fault=name, index=0, **common) for name in (*chosen, *clean)]
    counts = {name: -(-options.faulty // len(faulty)) for name in faulty}
    counts |= {name: -(-options.clean // len(clean)) for name in clean}
    cases = [Case(fault=name, index=i, **common) for name, count in counts.items() for i in range(count)]
    return sorted(cases, key=lambda case: case.index)  # any completed part is a fair sample


def resumed(path: Path | None, cases: Sequence[Case]) -> list[Outcome]:
    """Outcomes of these cases from an earlier call."""
    if path is None or not path.exists():
        return []
    found = [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
    wanted = {(case.device, case.fault, case.seed, case.index, case.ranks or None) for case in cases}
    return [o for o in found if {(o.device, o.fault, o.seed, o.index, r) for r in (None, o.num_ranks)} & wanted]


def judged(cases: Sequence[Case], jobs: int) -> Iterable[Outcome]:
    """Yield outcomes as they complete."""
    if jobs < 2 or len(cases) < 2:
        yield from map(judge, cases)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(judge, cases, chunksize=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if any offered analyzer made a mistake."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("--faulty", type=int, default=500, help="labelled faulty runs, over all faults (500)")
    parser.add_argument("--clean", type=int, default=500, help="clean runs (500)")
    parser.add_argument("--quick", action="store_true", help="one run of 8 ranks a fault, without steps to detection")
    parser.add_argument("--fault", action="append", choices=list(EXPECTED), help="only this fault; repeatable")
    parser.add_argument("--runs", type=int, default=10, help="runs of each --fault (10)")
    parser.add_argument("--index", type=int, help="only this run of each --fault")
    parser.add_argument("--ranks", type=int, default=0, help="ranks of every run; default: drawn from 8 to 1,024")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device whose records are simulated (cpu)"
    )
    parser.add_argument("--whole", action="store_true", help="judge whole runs only, without steps to detection")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after this time; 0: never")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="append outcomes here; skip its runs")
    parser.add_argument("--verbose", action="store_true", help="list the mistakes and how to reproduce them")
    options = parser.parse_args(arguments)
    cases = cases_of(options)
    start = time.perf_counter()
    outcomes = resumed(options.keep, cases)
    known = {(outcome.fault, outcome.index) for outcome in outcomes}
    for outcome in judged([case for case in cases if (case.fault, case.index) not in known], options.jobs):
        outcomes.append(outcome)
        if options.keep:
            with options.keep.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        if options.verbose:
            print_mistake(outcome)
        if options.seconds and time.perf_counter() - start > options.seconds:
            print(f"stopped after {options.seconds} s: {len(outcomes)} of {len(cases)} runs")
            break
    summary = summarize(outcomes)
    print_table(summary)
    print(f"{len(outcomes)} runs in {time.perf_counter() - start:.1f} s; seed {options.seed}")
    write_json(options.json, {**summary, "outcomes": [asdict(o) for o in outcomes]})
    overall = summary["overall"]
    return int(
        overall["precision"]["share"] not in (None, 1.0) or overall["errors"] > 0 or overall["contradictions"] > 0
    )


if __name__ == "__main__":
    sys.exit(main())
