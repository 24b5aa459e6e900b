"""Find thresholds that no recorded case needs: change each field of a policy, and compare the findings.

    python -m benchmarks.accuracy.ablation record CASES --runs 2                       # once: some minutes
    python -m benchmarks.accuracy.ablation fields CASES analyzers.stragglers.policy --json needed.json
    python -m benchmarks.accuracy.ablation verdicts CASES --json before.json           # before a change of the code
    python -m benchmarks.accuracy.ablation verdicts CASES --against before.json  # after it; exit code 1 if one differs

1. Cases are simulated runs of every fault and clean ones on CPUs and GPUs, long clean runs, the runs recorded on a real
   GPU, the incidents of `benchmarks.incidents`, and any other folder in CASES.
2. A number is set to nearly zero, half, double and a very large value; a flag to its opposite. Only the analyses that
   read the field run again, until a finding differs in kind, status, severity, cause, ranks, steps or place.
3. If a very small or very large value changes nothing, no case needs the threshold in that direction. Run the tests,
   too, before removing a field: there are few cases.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from analyzers.account import goodput
from analyzers.analysis import our_analyses
from analyzers.diagnose import diagnose
from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.finding import Finding
from analyzers.run.policy import stall_policy
from analyzers.run.records.cached_source import CachedSource
from analyzers.scope import Scope
from analyzers.whatif import what_if
from benchmarks.accuracy.ablation_cases import Recorded, cases, record
from benchmarks.harness import argument_parser, progress, write_json
from probes.tape.rundir import RunDir
from store import Store

LARGE = 10**9
Ask = Callable[[], Any]


def main(arguments: list[str] | None = None) -> int:
    """Run one of the three commands."""
    parser = argument_parser(__doc__, json=True)
    parser.add_argument("command", choices=("record", "fields", "verdicts"))
    parser.add_argument("cases", type=Path, help="folder of the recorded cases")
    parser.add_argument("modules", nargs="*", help="modules of the policies whose fields are changed")
    parser.add_argument("--runs", type=int, default=2, help="simulated runs of each fault and device (2)")
    parser.add_argument("--only", default="", help="cases whose names match this regular expression")
    parser.add_argument(
        "--trials", nargs="*", default=["low", "high", "half", "double"], help="values to set (all four)"
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time (600)")
    parser.add_argument("--against", type=Path, help="a result of `verdicts` to compare with")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.command == "record":
        options.cases.mkdir(parents=True, exist_ok=True)
        record(options.cases, runs=options.runs)
        return 0
    chosen = [case for case in cases(options.cases) if re.search(options.only, case.name)]
    if options.command == "verdicts":
        if options.against and options.json and options.against.resolve() == options.json.resolve():
            parser.error("--json and --against are the same file: name another one for the new verdicts")
        return _verdicts(chosen, options.json, options.against)
    needed = needs(chosen, fields_of(options.modules), options.trials, time.monotonic() + options.seconds)
    write_json(options.json, needed)
    for name, found in needed.items():
        print(f"{name}: " + ", ".join(f"{trial} {case or '-'}" for trial, case in found.items()))
    idle = [name for name, found in needed.items() if not all(found.values())]
    print(f"{len(needed)} fields, {len(idle)} that no case needs at one of these values: {', '.join(idle) or 'none'}")
    return 0


def _verdicts(chosen: list[Recorded], written: Path | None, against: Path | None) -> int:
    found: dict[str, Any] = json.loads(written.read_text()) if written and written.exists() else {}
    before = json.loads(against.read_text()) if against else {}
    known = [case for case in chosen if not against or case.name in before]
    differing = 0
    for case in known:
        if case.name not in found:  # a result of an interrupted call is compared, too
            found[case.name] = json.loads(json.dumps(verdict_of(case)))
            write_json(written, found)
        if before and found[case.name] != before[case.name]:
            differing += 1
            old, new = (set(map(repr, one)) for one in (before[case.name], found[case.name]))
            print(case.name, *(f"  - {one}" for one in sorted(old - new)), *(f"  + {one}" for one in sorted(new - old)))
    missing = f", {len(chosen) - len(known)} not in {against}" if len(known) < len(chosen) else ""
    print(f"{len(known)} cases, {differing} with another verdict{missing}")
    return int(bool(differing))


def verdict_of(case: Recorded) -> list[Any]:
    """Fired and suspected findings of a case, its advice, and its verdict."""
    try:
        if case.is_run:
            run = RunDir.open(case.path)
            with Store.open(run) as store:
                diagnosis = diagnose(store, run.manifest(), stacks_dir=run.stacks)
        else:
            diagnosis = diagnose_files([case.path])
    except Exception as error:  # a case that cannot be judged is a result, too
        return [f"{type(error).__name__}: {error}"[:300]]
    return [diagnosis.verdict, *(essence(finding) for finding in diagnosis.findings)]


def essence(finding: Finding) -> list[Any]:
    """The compared fields of a finding: those on which a user acts."""
    return [
        finding.kind, finding.status, finding.severity, finding.cause, list(finding.ranks), finding.first_step,
        finding.last_step, finding.attempt, finding.evidence.get("place"),
    ]  # fmt: skip


Field = tuple[type, str, Any]


def fields_of(modules: list[str]) -> list[Field]:
    """(policy, name, default) of all fields with a plain default in these modules' policies."""
    return [
        (policy, field.name, field.default)
        for module in map(importlib.import_module, modules)
        for policy in vars(module).values()
        if dataclasses.is_dataclass(policy) and isinstance(policy, type) and policy.__module__ == module.__name__
        for field in dataclasses.fields(policy)
        if isinstance(field.default, (bool, int, float))
    ]


def trials(default: float) -> dict[str, Any]:
    """Values by name: two at which the threshold never or always holds, half, and double."""
    if isinstance(default, bool):
        return {"low": not default, "high": not default}
    if isinstance(default, int):
        return {"low": min(1, default), "high": 1000 * default, "half": max(1, default // 2), "double": 2 * default}
    return {"low": 1e-9, "high": float(LARGE), "half": default / 2, "double": default * 2}


def needs(
    chosen: list[Recorded], fields: list[Field], tried: list[str], deadline_s: float
) -> dict[str, dict[str, str]]:
    """{Policy.field: {trial: first case whose findings differ, or empty}}."""
    found = {f"{policy.__name__}.{name}": dict.fromkeys(tried, "") for policy, name, _ in fields}
    changes = {policy: Changes(policy) for policy, _, _ in fields}
    for number, case in enumerate(chosen):
        if time.monotonic() > deadline_s:
            print(f"stopped by --seconds after {number} of {len(chosen)} cases", file=sys.stderr)
            break
        for ask, result, read in _asked(case, fields):
            for policy, name, default in fields:
                if (policy, name) not in read:
                    continue
                known = found[f"{policy.__name__}.{name}"]
                for trial in tried:
                    if not known[trial]:
                        with changes[policy].to(name, trials(default)[trial]):
                            known[trial] = case.name if _answer(ask) != result else ""
        progress(number + 1, len(chosen), case.name)
    return found


def _asked(case: Recorded, fields: list[Field]) -> Iterator[tuple[Ask, Any, set[tuple[type, str]]]]:
    """(analysis, its findings, fields that it reads) for every analysis of the case."""
    policies = {policy for policy, _, _ in fields}
    if not case.is_run:
        ask: Ask = partial(verdict_of, case)
        yield ask, *_reading(ask, policies)
        return
    run = RunDir.open(case.path)
    manifest = run.manifest()
    with Store.open(run) as store:
        source, scope = CachedSource(store), Scope(manifest=manifest, stacks_dir=run.stacks)
        asks: list[Ask] = [partial(_findings, one, source, scope) for one in our_analyses()]
        asks.append(lambda: repr(goodput.measure(source, stall_policy(manifest), None)))
        asks.append(lambda: repr(what_if.measure(source)))
        for ask in asks:
            yield ask, *_reading(ask, policies)


def _findings(analysis: Any, source: Any, scope: Scope) -> list[list[Any]]:
    return [essence(finding) for finding in analysis.run(source, scope)]


def _answer(ask: Ask) -> Any:
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _reading(ask: Ask, policies: set[type]) -> tuple[Any, set[tuple[type, str]]]:
    """Run an analysis; return its findings and the fields that it read."""
    read: set[tuple[type, str]] = set()

    def recorded(policy: type) -> Callable[[Any, str], Any]:
        def get(self: Any, name: str) -> Any:
            read.add((policy, name))
            return object.__getattribute__(self, name)

        return get

    for policy in policies:
        policy.__getattribute__ = recorded(policy)  # type: ignore[method-assign]
    try:
        return _answer(ask), read
    finally:
        for policy in policies:
            del policy.__getattribute__  # type: ignore[misc]


class Changes:
    """Temporarily changes the default of a frozen dataclass, and the instances made with it."""

    def __init__(self, policy: type) -> None:
        self._defaults: dict[str, Any] = policy.__init__.__kwdefaults__  # type: ignore[misc]
        self._instances = [one for one in gc.get_objects() if type(one) is policy]
        self._undo: list[Callable[[], None]] = []

    def to(self, name: str, value: Any) -> Changes:
        """Change a field."""
        default = self._defaults[name]
        self._defaults[name] = value
        self._undo.append(partial(self._defaults.__setitem__, name, default))
        for one in self._instances:
            if getattr(one, name) == default:
                object.__setattr__(one, name, value)
                self._undo.append(partial(object.__setattr__, one, name, default))
        return self

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()


if __name__ == "__main__":
    sys.exit(main())
