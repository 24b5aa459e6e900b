"""Processor time of `rankscope analyze`."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from tests.factories import make_run


def test_analyze_is_fast(tmp_path: Path) -> None:
    """Beside ten million additions, since machines differ: half a second on a usual one, one on a slow one."""
    run = make_run(tmp_path, ranks=4, steps=150)
    analyze = ["-m", "rankscope", "analyze", str(run.path)]
    additions = ["-c", "sum = 0\nfor i in range(10_000_000): sum += i"]
    tries = [(_cpu_s(*analyze), _cpu_s(*additions)) for _ in range(3)]
    analyze_s, additions_s = map(min, zip(*tries, strict=True))  # what others take from the caches is not its own
    assert analyze_s < 3 * additions_s, tries


def _cpu_s(*arguments: str) -> float:
    """Processor time of a Python process (s), which other work on the machine changes less than its duration."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
