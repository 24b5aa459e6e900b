"""Recorded cases of `benchmarks.accuracy.ablation`: simulated runs with labels, long clean ones, runs recorded on a
real GPU, incidents.

record(Path("cases"), runs=2)                 # once: some minutes
for case in cases(Path("cases")): case.name, case.path, case.label
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accuracy.false_alarms import long_run
from benchmarks.accuracy.labelled import EXPECTED, Case, make
from benchmarks.incidents.score import ROUNDS, load
from tests.support.recorded_gpu import NAMES, gpu_recording
from tests.support.simulator import simulate, write
from tests.support.simulator.long import write_long

__all__ = ["Recorded", "cases", "record"]

LONG_STEPS = 3_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A folder to be judged. `label` is None if it has no list of expected findings."""

    name: str
    path: Path
    is_run: bool
    label: dict[str, object] | None = None


def record(folder: Path, *, runs: int, ranks: int = 8) -> None:
    """Write missing cases: `runs` runs of each fault and device, and as many long clean ones."""
    for index in range(runs):
        for device in ("cpu", "cuda"):
            for fault in EXPECTED:
                case = Case(fault=fault, seed=7, index=index, ranks=ranks if index % 2 == 0 else 16, device=device)
                _simulate(case, folder / f"{fault}-{device}-{index}")
        for seed in range(6 * index, 6 * index + 6):
            name, long = long_run(seed, LONG_STEPS)
            path = folder / f"long-{name.replace(' ', '_')}-{seed}"
            if not path.exists():
                write_long(long, path)
    for name in NAMES:
        target = folder / f"gpu-{name}"
        if (run := gpu_recording(name) / "run").is_dir() and not target.exists():
            target.symlink_to(run)
    for name in ROUNDS:
        for number, incident in enumerate(load(name)):
            path = folder / f"incident-{name}-{number:02d}"
            for file, text in {} if path.exists() else incident.files.items():
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                (path / file).write_text(text, encoding="utf-8")


def _simulate(case: Case, path: Path) -> None:
    label = path.with_suffix(".json")
    if label.exists():
        return
    scenario, truth = make(case)
    write(simulate(scenario), path)
    label.write_text(json.dumps({"fault": case.fault, "truth": truth}))


def cases(folder: Path) -> Iterator[Recorded]:
    """All cases of the folder; any other folder in it is a case as well."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            label = path.with_suffix(".json")
            expected = json.loads(label.read_text()) if label.exists() else None
            yield Recorded(name=path.name, path=path, is_run=(path / "run.json").exists(), label=expected)
