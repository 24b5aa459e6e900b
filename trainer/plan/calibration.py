"""Time of a step, corrected by the first steps of a run on the same devices.

    found = calibrate(Path("runs/latest"), hardware)
    expected = calibrated(expected, found.factor)           # all times multiplied by the factor

The factor is the measured step time of the run divided by the time that a plan with the run's settings predicts for the
hardware. So a short run of a small layout corrects the plan of a large layout. This assumes that the prediction is
wrong by the same factor for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.load import ConfigError, changed_config
from trainer.layout.resolve import resolve
from trainer.plan.expected import Expected, expect
from trainer.plan.hardware import Hardware
from trainer.plan.strategies import Strategies

__all__ = ["Calibration", "calibrate", "calibrated", "calibrated_strategies"]

WARM_UP_STEPS = 5
MAX_STEPS = 50
"""Maximum number of steps that are read after the warm-up. It is low, so that they come before any trouble in the
run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    run: str
    device: str
    """Name of the device on which the run trained, as recorded in the run; empty if unknown."""
    num_steps: int
    measured_s: float
    """Median duration of the steps in seconds."""
    planned_s: float

    @property
    def factor(self) -> float:
        """Measured / planned step time."""
        return self.measured_s / self.planned_s


def calibrate(folder: Path, hardware: Hardware) -> Calibration:
    """Compare a run's first steps with its own plan. Raises ConfigError, one line."""
    from probes.tape.rundir import RunDir, RunError
    from store import Store, StoreError

    try:
        run = RunDir.open(folder)
        manifest = run.manifest()
        with Store.open(run) as store:
            steps = _first_steps(store)
    except (RunError, StoreError, OSError) as error:
        raise ConfigError(f"--calibrate {folder}: {error}") from None
    if steps is None:
        raise ConfigError(f"--calibrate {folder}: it has no steps after the first {WARM_UP_STEPS}")
    num_steps, measured_s = steps
    return Calibration(
        run=run.path.name,
        device=str(manifest.get("device_name") or ""),
        num_steps=num_steps,
        measured_s=measured_s,
        planned_s=_planned(folder, manifest, hardware).step_s,
    )


def calibrated(expected: Expected, factor: float) -> Expected:
    """Return the estimate with all times multiplied by `factor`."""
    groups = (replace(one, seconds=one.seconds * factor, exposed_s=one.exposed_s * factor) for one in expected.groups)
    return replace(
        expected,
        compute_s=expected.compute_s * factor,
        groups=tuple(groups),
        step_s=expected.step_s * factor,
        tokens_per_s=expected.tokens_per_s / factor,
        mfu=expected.mfu / factor,
    )


def calibrated_strategies(found: Strategies, factor: float) -> Strategies:
    """Calibrate every layout that was tried."""
    return replace(found, tried=tuple(replace(one, expected=calibrated(one.expected, factor)) for one in found.tried))


def _first_steps(store: Any) -> tuple[int, float] | None:
    """Return (number, median seconds) of the first attempt's steps after its warm-up; None if there are none."""
    if not store.has("steps"):
        return None
    ((count, median_ns),) = store.rows(
        """
        WITH first AS (SELECT attempt, min(step) AS step FROM steps WHERE rank >= 0 GROUP BY attempt
                       ORDER BY attempt LIMIT 1)
        SELECT count(DISTINCT steps.step), median(duration_ns) FROM steps, first
        WHERE steps.attempt = first.attempt AND rank >= 0 AND duration_ns IS NOT NULL
          AND steps.step >= first.step + ? AND steps.step < first.step + ?
        """,
        [WARM_UP_STEPS, WARM_UP_STEPS + MAX_STEPS],
    )
    return (int(count), median_ns / 1e9) if count else None


def _planned(folder: Path, manifest: Mapping[str, Any], hardware: Hardware) -> Expected:
    content, world_size = manifest.get("config"), manifest.get("world_size")
    if not isinstance(content, Mapping) or not isinstance(world_size, int):
        raise ConfigError(f"--calibrate {folder}: its run.json has no configuration of a training")
    config = changed_config(dict(content), [])
    return expect(config, resolve(config, world_size), hardware)
