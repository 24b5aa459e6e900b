"""Thresholds that no test needs: each field of a policy is set to values that disable it, and the tests that judge run.

    python -m benchmarks.ablation analyzers.stragglers.policy tests/analyzers/stragglers
    python -m benchmarks.ablation analyzers.hangs.policy tests/analyzers/hangs --only min_steps_before --json out.json

1. A number is set to 0 and to a billion, a tuple to its first and to its last item, a flag to its opposite.
2. Each trial is a fork of one process that has imported everything: the default of the class and the instances that
   exist are changed there, and pytest ends at the first failure.
3. A field is *needed* if each value fails a test, *one-sided* if one value fails none: the condition that it belongs to
   can be taken out, or the field made a constant. Judge by the scoreboards before removing one: tests are few cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ALL = 10**9


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each trial and the fields that nothing needs; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="module of the policies")
    parser.add_argument("tests", nargs="+", help="folders or files of tests that judge verdicts")
    parser.add_argument("--only", nargs="*", default=[], help="names of fields, or Policy.field")
    parser.add_argument("--limit-s", type=int, default=600, help="a trial that takes longer counts as failed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    import pytest  # before the forks

    importlib.import_module("tests.analyzers.memory_store")
    module = importlib.import_module(options.module)
    if run_tests(pytest, options.tests, options.limit_s):
        sys.stderr.write("the tests fail without any change\n")
        return 2
    found: dict[str, dict[str, str]] = {}
    for policy, field in fields_of(module):
        name = f"{policy.__name__}.{field.name}"
        if options.only and not {name, field.name} & {*options.only}:
            continue
        for value in disabling(field.default):
            started_s = time.monotonic()
            failed = run_tests(pytest, options.tests, options.limit_s, change=(policy, field, value))
            found.setdefault(name, {})[repr(value)] = "fails" if failed else "passes"
            print(f"{name} = {value!r}: {found[name][repr(value)]} ({time.monotonic() - started_s:.0f} s)", flush=True)
            if not failed:
                break  # it is not needed
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    idle = [name for name, values in found.items() if "passes" in values.values()]
    print(f"{len(found)} fields, {len(idle)} without a test that needs them: {', '.join(idle) or 'none'}")
    return 0


def fields_of(module: Any) -> list[tuple[type, dataclasses.Field[Any]]]:
    """Fields with a plain default, of the policies that the module defines."""
    policies = [
        one for one in vars(module).values() if dataclasses.is_dataclass(one) and one.__module__ == module.__name__
    ]
    return [
        (policy, field)
        for policy in policies
        if isinstance(policy, type)
        for field in dataclasses.fields(policy)
        if field.default is not dataclasses.MISSING
    ]


def disabling(default: Any) -> tuple[Any, ...]:
    """Values at which a threshold never or always holds."""
    if isinstance(default, bool):
        return (not default,)
    if isinstance(default, (int, float)):
        return (type(default)(0), type(default)(ALL))
    if isinstance(default, tuple) and len(default) > 1:
        return (default[:1], default[-1:])
    return ()


def change_default(policy: type, field: dataclasses.Field[Any], value: Any) -> None:
    """Change the default of a frozen dataclass and the instances made with it."""
    policy.__init__.__kwdefaults__[field.name] = value  # type: ignore[misc]
    for instance in gc.get_objects():
        if type(instance) is policy and getattr(instance, field.name) == field.default:
            object.__setattr__(instance, field.name, value)


def run_tests(pytest: Any, tests: list[str], limit_s: int, change: tuple[Any, ...] | None = None) -> bool:
    """Return True if a test fails, in a fork of this process."""
    pid = os.fork()
    if pid == 0:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        if change is not None:
            change_default(*change)
        os._exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider"]) != 0))
    deadline = time.monotonic() + limit_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status != 0
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return True
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
