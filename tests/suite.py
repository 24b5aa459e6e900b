"""Run every check in as many processes as there are cores, and in more while a core is idle: `make test`.

    python -m tests.suite                  # lint, types and all tests but tests/trials
    python -m tests.suite store watch      # some groups only

A group is a folder of tests/, or a part of one, run by pytest in a fork of a process that has imported torch and the
project (`tests.forked`), from which the processes of its tests are forked, too. A failed test of real processes is run
again alone at the end. If it passes then, the suite stays green and lists it as *unsteady*, with both outputs in
build/test-results. More than three of these make the suite red, and so does any other failure.
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
from typing import Any

from tests.forked import ForkedPython
from tests.support.idle_cores import IdleCores

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "build" / "test-results"
MAX_UNSTEADY = 3
NUM_SLOWEST = 40
NUM_SLOWEST_FILES = 20

_PARTS = {
    "e2e": 4, "trainer": 4, "analyzers": 3, "dashboard": 2, "probes": 2, "project": 2, "rankscope": 2, "store": 2,
}  # fmt: skip
"""Folders that take minutes, and the number of their groups: short groups leave no core idle at the end."""
# First those that wait (for a watch, a limit, a restart), then those that take longest, last what is short.
_ORDER = (
    "e2e-1", "e2e-2", "trainer-1", "e2e-3", "trainer-2", "e2e-4", "trainer-3", "trainer-4", "dashboard-1",
    "analyzers-1", "dashboard-2", "rankscope-1", "analyzers-2", "project-1", "analyzers-3", "rankscope-2", "project-2",
    "store-1", "probes-1", "store-2", "probes-2", "watch", "lint", "hostile", "grafana",
)  # fmt: skip
_IDLE_SHARE = 0.06
"""Idle share of the cores at which another group starts."""
_LOOK_S = 2.0
"""Seconds over which idle time is measured: a group that has just started is not busy earlier."""
_MAX_GROUPS_A_CORE = 3
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
    """A shell command for lint, otherwise arguments of an interpreter."""
    process: subprocess.Popen[Any] | None = None
    began_s: float = 0.0
    took_s: float = 0.0
    results: list[Result] = field(default_factory=list)
    cpu_s: float = 0.0
    """Includes processes that its tests started and waited for; 0 for lint."""
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

    def start(self) -> Group:
        """Start the group's process, its output into its log."""
        self.began_s = time.monotonic()
        with self.log.open("wb") as log:
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            if self.command[0] == "-m":
                self.process = ForkedPython(self.command, forks=True, cwd=ROOT, **files)
            else:
                self.process = subprocess.Popen(self.command, cwd=ROOT, **files)
        return self

    def stop(self) -> None:
        """Interrupt the group; its tests end the processes that they started."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT if self.command[0] == "-m" else signal.SIGTERM)
        self.process.wait()

    def finish(self) -> None:
        """Read the results of the ended process."""
        assert self.process is not None
        self.took_s = time.monotonic() - self.began_s
        self.results, running, self.cpu_s = read_results(self.records)
        code = self.process.returncode
        if running:
            self.problem = f"ended with code {code} during {running}"
        elif code not in (0, 1, 5) or (code == 1 and not any(result.outcome == "failed" for result in self.results)):
            self.problem = f"ended with code {code}"

    def line(self) -> str:
        """One line of progress."""
        counts = count(self.results)
        parts = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome]]
        return f"  {self.name:11} {', '.join(parts) or 'done':34} {self.took_s:5.0f} s {self.cpu_s:6.0f} CPU s" + (
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
    is_green = not red and len(unsteady) <= MAX_UNSTEADY and not any(group.problem for group in chosen)
    counts = count(results)
    print(f"{time.monotonic() - began_s:.0f} s, {'green' if is_green else 'RED'}")
    print(f"{counts['passed'] + len(unsteady)} passed, {len(red)} failed, {counts['skipped']} skipped")
    return 0 if is_green else 1


def find_groups() -> dict[str, Group]:
    """Every folder of tests/ but the trials, the files of tests/ itself, and lint; in the order of their start."""
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name not in _NOT_GROUPS]
    inside = {folder.name: sorted(folder.rglob("test_*.py")) for folder in folders}
    inside["project"] = sorted((ROOT / "tests").glob("test_*.py"))
    arguments: dict[str, list[str]] = {}
    for folder, found in inside.items():
        paths, parts = [str(path.relative_to(ROOT)) for path in found], _PARTS.get(folder, 1)
        for part in range(parts):
            arguments[f"{folder}-{part + 1}" if parts > 1 else folder] = paths[part::parts]
    groups = {name: Group(name, _pytest(name, paths)) for name, paths in arguments.items()}
    steps = " && ".join(" ".join([sys.executable, "-m", *step]) for step in _LINT)
    groups["lint"] = Group("lint", ["sh", "-c", steps])
    order = {name: i for i, name in enumerate(_ORDER)}
    return {name: groups[name] for name in sorted(groups, key=lambda name: (order.get(name, len(order)), name))}


def run_groups(groups: list[Group], *, num_cores: int) -> None:
    """Run the groups in their order, `num_cores` at a time and more while some wait; a line for each that ends."""
    waiting, running = list(groups), list[Group]()
    cores, looked_s = IdleCores(), time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < num_cores:
                running.append(waiting.pop(0).start())
            if time.monotonic() - looked_s > _LOOK_S:
                looked_s = time.monotonic()
                is_idle = cores.share() > _IDLE_SHARE
                if is_idle and waiting and num_cores > 1 and len(running) < _MAX_GROUPS_A_CORE * num_cores:
                    running.append(waiting.pop(0).start())
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert running[0].process is not None
                running[0].process.wait(0.2)
            for group in [group for group in running if group.process and group.process.poll() is not None]:
                running.remove(group)
                group.finish()
                print(group.line(), flush=True)
    finally:
        for group in running:
            group.stop()


def run_again(failed: list[Result]) -> list[Result]:
    """Failed tests of real processes that pass by themselves, unless so many failed that the code is at fault."""
    candidates = [result for result in failed if result.real]
    if len(candidates) > 2 * MAX_UNSTEADY:
        return []
    unsteady = []
    for result in candidates:
        name = "again-" + re.sub(r"\W+", "-", result.test)[-100:]
        (RESULTS / f"{name}-first.log").write_text(result.text)
        group = Group(name, _pytest(name, [result.test]))
        run_groups([group], num_cores=1)
        if group.results and all(rerun.outcome == "passed" for rerun in group.results) and not group.problem:
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
    print(f"\nfiles that cost most (wall s, CPU s, tests): {NUM_SLOWEST_FILES} of them")
    by_time = sorted(files.items(), key=lambda item: -sum(result.cpu_s for result in item[1]))
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


def read_results(path: Path) -> tuple[list[Result], str, float]:
    """Results of a file, the test that had begun and not ended, and the CPU seconds of all."""
    results, running, cpu_s = [], "", 0.0
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        for line in file:
            fields = _parse(line)
            if "outcome" in fields:
                results.append(Result(**fields))
                running = ""
            elif "session_cpu_s" in fields:
                cpu_s = float(fields["session_cpu_s"])
            else:
                running = fields.get("test", "")
    return results, running, cpu_s


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
    return ["-m", "pytest", *results, *paths]


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each interpreter would compile what it imports: a CPU-second
    signal.signal(signal.SIGTERM, _interrupt)  # the groups end with it
    signal.signal(signal.SIGINT, _interrupt)  # a shell starts background jobs with SIGINT ignored, and tests send it
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
