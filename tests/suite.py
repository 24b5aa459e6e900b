"""Run every check in as many processes as there are cores, and one more while some wait: `make test`.

    python -m tests.suite                  # lint, types and all tests but tests/trials
    python -m tests.suite store watch      # some groups only

A group is a folder of tests/ and collects that folder alone. A test of real processes that fails runs again by itself
at the end. Where it passes then, the suite stays green and names it *unsteady*, with both outputs kept in
build/test-results; more than three of these are red. Any other failure is red at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "test-results"
MOST_UNSTEADY = 3
NUM_SLOWEST = 40
NUM_SLOWEST_FILES = 20

# First the groups that take longest; next to those that wait one that takes no more than its core.
_ORDER = (
    "e2e-1", "e2e-2", "analyzers", "trainer-1", "trainer-2", "dashboard", "project", "probes", "store", "rankscope",
    "watch", "lint",
)  # fmt: skip
_HALVED = frozenset({"e2e", "trainer"})
"""Folders that take several minutes: two groups each."""
_WAITS = frozenset({"e2e"})
"""Folders whose tests wait for half of their time (for a watch, a limit, a restart): half a core each."""
_LINT = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
_NOT_GROUPS = frozenset({"trials", "support", "recorded", "__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome and cost of one test, as `tests.support.results` writes it."""

    test: str
    outcome: str
    real: bool
    wall_s: float
    cpu_s: float
    text: str


@dataclass(slots=True)
class Group:
    """One process of the suite: a folder of tests, or lint."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    began_s: float = 0.0
    took_s: float = 0.0
    results: list[Result] = field(default_factory=list)
    problem: str = ""
    """Why the group is red beyond its failed tests: lint, a crash, an error of collection."""

    @property
    def log(self) -> Path:
        """Everything that the group printed."""
        return RESULTS / f"{self.name}.log"

    @property
    def records(self) -> Path:
        """File of `tests.support.results`."""
        return RESULTS / f"{self.name}.jsonl"

    @property
    def num_cores(self) -> float:
        """What it takes of the machine."""
        return 0.5 if self.name.rpartition("-")[0] in _WAITS else 1.0

    def start(self) -> None:
        """Start the group's process, its output into its log."""
        self.began_s = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def finish(self) -> None:
        """Read what the ended process left."""
        assert self.process is not None
        self.took_s = time.monotonic() - self.began_s
        self.results, running = read_results(self.records)
        code = self.process.returncode
        if running:
            self.problem = f"ended with code {code} during {running}"
        elif code not in (0, 1, 5) or (code == 1 and not any(result.outcome == "failed" for result in self.results)):
            self.problem = f"ended with code {code}"

    def line(self) -> str:
        """One line of progress."""
        counts = count(self.results)
        parts = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome]]
        return f"  {self.name:10} {', '.join(parts) or 'done':42} {self.took_s:5.0f} s" + (
            f"   {self.problem}" if self.problem else ""
        )


def main(names: list[str]) -> int:
    """Run the groups; return the exit code."""
    began_s = time.monotonic()
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    groups = find_groups()
    names = [group for group in groups for name in names if group == name or group.rpartition("-")[0] == name] or names
    if unknown := set(names) - groups.keys():
        print(f"no group {', '.join(sorted(unknown))}; there are: {', '.join(groups)}", file=sys.stderr)
        return 2
    chosen = [group for name, group in groups.items() if not names or name in names]
    run_groups(chosen, num_cores=max(2, len(os.sched_getaffinity(0))))
    results = [result for group in chosen for result in group.results]
    failed = [result for result in results if result.outcome == "failed"]
    unsteady = run_again(failed)
    report(chosen, results, failed, unsteady)
    red = [result for result in failed if result not in unsteady]
    is_green = not red and len(unsteady) <= MOST_UNSTEADY and not any(group.problem for group in chosen)
    counts = count(results)
    print(f"{time.monotonic() - began_s:.0f} s, {'green' if is_green else 'RED'}")
    print(f"{counts['passed'] + len(unsteady)} passed, {len(red)} failed, {counts['skipped']} skipped")
    return 0 if is_green else 1


def find_groups() -> dict[str, Group]:
    """Every folder of tests/ but the trials, the files of tests/ itself, and lint; in the order of their start."""
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in _NOT_GROUPS]
    arguments: dict[str, list[str]] = {}
    for folder in folders:
        if folder.name in _HALVED:
            inside = sorted(path for path in folder.iterdir() if path.name.startswith("test_") or _has_tests(path))
            for half in (0, 1):
                arguments[f"{folder.name}-{half + 1}"] = [str(path.relative_to(ROOT)) for path in inside[half::2]]
        else:
            arguments[folder.name] = [f"tests/{folder.name}"]
    arguments["project"] = sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py"))
    groups = {name: Group(name, _pytest(name, paths)) for name, paths in arguments.items()}
    steps = " && ".join(" ".join([sys.executable, "-m", *step]) for step in _LINT)
    groups["lint"] = Group("lint", ["sh", "-c", steps])
    places = {name: place for place, name in enumerate(_ORDER)}
    return {name: groups[name] for name in sorted(groups, key=lambda name: (places.get(name, len(places)), name))}


def _has_tests(path: Path) -> bool:
    return path.is_dir() and any(path.rglob("test_*.py"))


def run_groups(groups: list[Group], *, num_cores: int) -> None:
    """Run the groups in their order, as many at a time as there are cores for, with a line for each that ends."""
    waiting, running = list(groups), list[Group]()
    try:
        while waiting or running:
            while waiting and sum(group.num_cores for group in running) + waiting[0].num_cores <= num_cores:
                group = waiting.pop(0)
                group.start()
                running.append(group)
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert running[0].process is not None
                running[0].process.wait(0.2)
            for group in [group for group in running if group.process and group.process.poll() is not None]:
                running.remove(group)
                group.finish()
                print(group.line(), flush=True)
    finally:
        for group in running:
            assert group.process is not None
            group.process.terminate()
            group.process.wait()


def run_again(failed: list[Result]) -> list[Result]:
    """Failed tests of real processes that pass by themselves, unless so many failed that the code is at fault."""
    candidates = [result for result in failed if result.real]
    if len(candidates) > 2 * MOST_UNSTEADY:
        return []
    unsteady = []
    for result in candidates:
        name = "again-" + re.sub(r"\W+", "-", result.test)[-100:]
        (RESULTS / f"{name}-first.log").write_text(result.text)
        group = Group(name, _pytest(name, [result.test]))
        run_groups([group], num_cores=1)
        if group.results and all(again.outcome == "passed" for again in group.results) and not group.problem:
            unsteady.append(result)
    return unsteady


def report(groups: list[Group], results: list[Result], failed: list[Result], unsteady: list[Result]) -> None:
    """Print where the time went, then what failed."""
    print(f"\nslowest {NUM_SLOWEST} tests (wall s, CPU s of the test and of children it waited for)")
    for result in sorted(results, key=lambda result: -result.wall_s)[:NUM_SLOWEST]:
        print(f"  {result.wall_s:6.1f} {result.cpu_s:6.1f}  {result.test}")
    files: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        files[result.test.partition("::")[0]].append(result)
    print(f"\nslowest {NUM_SLOWEST_FILES} files (wall s, CPU s, tests)")
    by_time = sorted(files.items(), key=lambda item: -sum(result.wall_s for result in item[1]))
    for name, inside in by_time[:NUM_SLOWEST_FILES]:
        wall_s, cpu_s = sum(result.wall_s for result in inside), sum(result.cpu_s for result in inside)
        print(f"  {wall_s:6.1f} {cpu_s:6.1f} {len(inside):4}  {name}")
    print()
    for group in groups:
        if group.problem:
            print(f"=== {group.name}: {group.problem}; the end of {group.log.relative_to(ROOT)}:")
            print("\n".join(group.log.read_text(errors="replace").splitlines()[-60:]))
    for result in failed:
        if result not in unsteady:
            print(f"=== FAILED {result.test}\n{result.text}")
    if unsteady:
        print(f"{len(unsteady)} unsteady: failed once, passed when run again (outputs in {RESULTS.relative_to(ROOT)})")
        for result in unsteady:
            print(f"  unsteady {result.test}: {_last_line(result.text)}")


def read_results(path: Path) -> tuple[list[Result], str]:
    """Results of a file, and the test that had begun and not ended."""
    results, running = [], ""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        for line in file:
            fields = _parse(line)
            if "outcome" in fields:
                results.append(Result(**fields))
                running = ""
            else:
                running = fields.get("test", "")
    return results, running


def count(results: list[Result]) -> dict[str, int]:
    """Number of results by outcome."""
    counts: dict[str, int] = defaultdict(int)
    for result in results:
        counts[result.outcome] += 1
    return counts


def _parse(line: str) -> dict[str, str]:
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}  # The process died in the middle of this line.


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E  ")]
    return lines[-1][1:].strip() if lines else "no assertion"


def _pytest(name: str, paths: list[str]) -> list[str]:
    results = ["-p", "tests.support.results", "--results", str(RESULTS / f"{name}.jsonl")]
    return [sys.executable, "-m", "pytest", *results, *paths]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # the groups end with it
    signal.signal(signal.SIGINT, _interrupt)  # a shell starts background jobs with SIGINT ignored, and tests send it
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
