"""Repeat the trials and write their rates into docs/testing.md: `make trials`.

    python -m tests.trials                      # all of them, each as often as its marker says; hours
    python -m tests.trials e2e/test_slurm.py    # some files
    python -m tests.trials --times 1            # each once
    python -m tests.trials -k network           # those with this in their name
    python -m tests.trials --again              # also those that have a row of this commit

A trial is a test in tests/trials. `@pytest.mark.trial(times=5, at_least=0.8)` says how often it runs and which share of
the runs has to pass; without it, three times and all. One runs at a time, with nothing next to it. The row of a trial
is written when it has ended: a run that was interrupted goes on with the first that has no row of this commit.
"""

from __future__ import annotations

import argparse
import datetime
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.suite import RESULTS, ROOT, Result, read_results

PAGE = ROOT / "docs" / "testing.md"
TIMES = 3
_FOLDER = Path(__file__).parent
_BETWEEN = re.compile(r"(?<=<!-- trials -->\n).*?(?=<!-- /trials -->)", re.DOTALL)


@dataclass(slots=True)
class Trial:
    """One test function of tests/trials, over its parameters."""

    path: str
    name: str
    times: int = TIMES
    at_least: float = 1.0
    results: list[Result] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Share of the runs that passed, of those that were not skipped."""
        ran = [result for result in self.results if result.outcome != "skipped"]
        return sum(result.outcome == "passed" for result in ran) / len(ran) if ran else float("nan")

    @property
    def place(self) -> str:
        """First cell of its row, which no other trial has: the test below tests/trials."""
        return f" `{self.path.removeprefix('tests/trials/')}::{self.name}` "

    def row(self, commit: str, date: str) -> str:
        """Row of the page's table."""
        ran = [result for result in self.results if result.outcome != "skipped"]
        passed = sum(result.outcome == "passed" for result in ran)
        longest_s = max((result.wall_s for result in ran), default=0.0)
        bound = "" if self.at_least == 1.0 else f" (at least {self.at_least:.0%})"
        rate = f"{passed} of {len(ran)}{bound}" if ran else "skipped"
        return f"|{self.place}| {rate} | {longest_s:.0f} s | {commit}, {date} |"


def main() -> int:
    """Run the trials; 1 if a rate is below its bound."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials", description="Repeat the trials, write their rates.")
    parser.add_argument("files", nargs="*", help="files below tests/trials; all of them by default")
    parser.add_argument("--times", type=int, help="how often each runs, in place of what its marker says")
    parser.add_argument("-k", default="", metavar="PART", help="only those with this in their file or name")
    parser.add_argument("--again", action="store_true", help="also those that have a row of this commit")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    paths = [_FOLDER / name for name in options.files] or sorted(_FOLDER.rglob("test_*.py"))
    trials: dict[tuple[str, str], Trial] = {}
    for path in paths:
        for trial in _collect(path):
            if options.k in f"{trial.path} {trial.name}":
                trials[trial.path, trial.name] = trial
    there = {} if options.again else _rows_of(_commit())
    if known := [trial for trial in trials.values() if trial.place in there]:
        print(f"{len(known)} of {len(trials)} have a row of this commit; --again runs them, too", flush=True)
    trials = {place: trial for place, trial in trials.items() if trial.place not in there}
    for number, trial in enumerate(trials.values()):
        trial.times = options.times or trial.times
        for time in range(trial.times):
            print(f"[{number + 1}/{len(trials)}] {trial.path} {trial.name}, {time + 1} of {trial.times}", flush=True)
            trial.results += _run(trial, f"trial-{number}-{time}")
        is_skipped = all(result.outcome == "skipped" for result in trial.results)
        outcome = "skipped here" if is_skipped else f"{trial.rate:.0%} passed, at least {trial.at_least:.0%}"
        print(f"    {outcome}", flush=True)
        _write_page(list(trials.values())[: number + 1])
    short = [trial for trial in trials.values() if trial.rate < trial.at_least]
    for trial in short:
        print(f"below its bound: {trial.path} {trial.name}, {trial.rate:.0%}; outputs in {RESULTS.relative_to(ROOT)}")
    before = [there[trial.place] for trial in known if _is_short(there[trial.place])]
    for row in before:
        print(f"below its bound before: {row}")
    passed = sum(result.outcome == "passed" for trial in trials.values() for result in trial.results)
    failed = sum(result.outcome == "failed" for trial in trials.values() for result in trial.results)
    print(f"{passed} passed, {failed} failed")
    return 1 if short or before else 0


def _collect(path: Path) -> list[Trial]:
    """Trials of one file, in its order."""
    name = path.relative_to(ROOT).as_posix()
    listing = RESULTS / "collected.txt"
    listing.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.trials.listing", "--collect-only", "-q", name]
    done = subprocess.run([*command, f"--listing={listing}"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        raise SystemExit(f"cannot collect {name}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Trial] = {}
    for line in listing.read_text().splitlines() if listing.exists() else []:
        function, times, at_least = line.split()
        found[function] = Trial(name, function, int(times), float(at_least))
    return list(found.values())


def _run(trial: Trial, name: str) -> list[Result]:
    records = RESULTS / f"{name}.jsonl"
    records.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-p", "tests.support.results", "--results", str(records),
        f"{trial.path}::{trial.name}",
    ]  # fmt: skip
    with (RESULTS / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        code = process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)  # a test that is killed leaves the processes of its run
        process.wait()
        raise
    results, running, _ = read_results(records)
    if code in (-signal.SIGTERM, -signal.SIGINT, pytest.ExitCode.INTERRUPTED):
        raise KeyboardInterrupt  # whoever ended it ends all: no rate
    if running or not results:  # it died, or could not be collected
        text = f"ended with code {code}"
        results.append(Result(test=running or name, outcome="failed", real=True, wall_s=0.0, cpu_s=0.0, text=text))
    return results


def _commit() -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _rows(text: str) -> dict[str, str]:
    """Rows of the page's table by the place of their trial."""
    found = _BETWEEN.search(text)
    if found is None:
        raise SystemExit(f"{PAGE.name} has no place for the table: <!-- trials --> and <!-- /trials -->")
    return {row.split("|")[1]: row for row in found[0].splitlines()[2:]}


def _rows_of(commit: str) -> dict[str, str]:
    rows = _rows(PAGE.read_text(encoding="utf-8"))
    return {place: row for place, row in rows.items() if row.split("|")[-2].strip().startswith(f"{commit},")}


def _is_short(row: str) -> bool:
    """Whether fewer passed than its bound asks for."""
    counts = re.match(r" (\d+) of (\d+)(?: \(at least (\d+)%\))? ", row.split("|")[2])
    return counts is not None and int(counts[1]) < int(counts[2]) * int(counts[3] or 100) / 100


def _write_page(trials: list[Trial]) -> None:
    """Replace the rows of these trials in the page and keep those of the others."""
    commit, date = _commit(), datetime.date.today().isoformat()
    text = PAGE.read_text(encoding="utf-8")
    rows = _rows(text) | {trial.place: trial.row(commit, date) for trial in trials}
    head = "| trial | passed | longest | commit, date |\n|---|---|---|---|\n"
    table = head + "".join(f"{row}\n" for _, row in sorted(rows.items()))
    PAGE.write_text(_BETWEEN.sub(lambda _: table, text), encoding="utf-8")


if __name__ == "__main__":
    # A shell starts background jobs with SIGINT ignored, and trials send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
