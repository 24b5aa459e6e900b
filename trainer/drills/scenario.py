"""Plan of a drill: which faults, on which mesh, at which step and rank.

    plan = plan_drill(config, ["F2", "nan_grad+kill"], meshes=["ddp", "fsdp*tp"], seeds=2, num_ranks=4)
    plan.scenarios[0].faults          # (Fault(kind="stop", step=14, rank=2), )
    plan.skipped                     # [("missing_send", "fsdp", "needs a pipeline")]

Step and rank are determined by seed, mesh and name, so a drill is reproducible.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.config import Config
from trainer.faults.catalogue import CATALOGUE, MESHES
from trainer.faults.kind import Expected, Kind, Recovery
from trainer.faults.options import Fault, parse_fault
from trainer.layout.plan import MESH_DIMS

__all__ = ["CLEAN", "DrillError", "DrillPlan", "Scenario", "choose_faults", "plan_drill"]

CLEAN = "none"
"""Name of the run without a fault: it must end without a finding."""
PAIRS = ("nan_grad+kill", "slow_data+nan_grad", "kill+kill")
"""Pairs of faults that `all` also injects in one run; the second one strikes after the response to the first."""
_CLEAN_STEPS = 30
_SPREAD_STEPS = 6
_BETWEEN_STEPS = 8
_RECOVERY_ORDER: tuple[Recovery, ...] = ("goes_on", "skips", "restarts", "stops")


class DrillError(ValueError):
    """The drill cannot be run as requested; the message is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run of a drill."""

    name: str
    mesh: str
    seed: int
    kinds: tuple[Kind, ...]
    faults: tuple[Fault, ...]
    steps: int
    settings: tuple[str, ...]
    """Changes of the configuration, `section.key=value`."""

    @property
    def label(self) -> str:
        """`F22 nan_grad`."""
        return f"{'+'.join(kind.fault_id for kind in self.kinds)} {self.name}" if self.kinds else "no fault"

    @property
    def what(self) -> str:
        """Description of the faults, in one line."""
        return "; then ".join(kind.what for kind in self.kinds) or "a clean run"

    @property
    def expected(self) -> tuple[tuple[Fault, Expected], ...]:
        """Required findings, each with its fault."""
        return tuple((f, e) for f, kind in zip(self.faults, self.kinds, strict=True) for e in kind.expected)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Kinds of findings that are neither required nor false alarms."""
        return tuple(name for kind in self.kinds for name in kind.allowed)

    @property
    def required_events(self) -> tuple[tuple[str, str], ...]:
        """Events that must be recorded: (kind, state)."""
        return tuple(kind.required_event for kind in self.kinds if kind.required_event[0])

    @property
    def recovery(self) -> Recovery:
        """The strongest recovery that its faults require."""
        return max((kind.recovery for kind in self.kinds), key=_RECOVERY_ORDER.index, default="goes_on")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """All runs of a drill, and the combinations that cannot run: (name, mesh, reason)."""

    scenarios: tuple[Scenario, ...]
    skipped: tuple[tuple[str, str, str], ...]


def choose_faults(asked: Sequence[str]) -> list[str]:
    """Resolve `all`, F-numbers, kinds, and kinds joined by `+` to scenario names. Raises DrillError."""
    chosen: list[str] = []
    for text in filter(None, (text.strip() for text in asked)):
        same_number = [name for name, kind in CATALOGUE.items() if text.upper() in kind.fault_ids]
        if text == "all":
            chosen += [CLEAN, *CATALOGUE, *PAIRS]
        elif text == CLEAN or all(part in CATALOGUE for part in text.split("+")):
            chosen.append(text)
        elif same_number:
            chosen += same_number
        else:
            near = difflib.get_close_matches(text, CATALOGUE, n=3, cutoff=0.8)
            hint = f"did you mean {' or '.join(near)}?" if near else "see `rankscope drill --list`"
            raise DrillError(f"--faults {text}: unknown; {hint}")
    return list(dict.fromkeys(chosen))


def plan_drill(
    config: Config, faults: Sequence[str], *, meshes: Sequence[str], seeds: int, num_ranks: int
) -> DrillPlan:
    """Plan every run. Raises DrillError for an unknown fault or mesh, or a mesh that does not fit the number of
    ranks.
    """
    scenarios, skipped = [], []
    for mesh in meshes:
        shape = _mesh_settings(mesh, num_ranks)
        for name in choose_faults(faults):
            if reason := _cannot(name, mesh, config, num_ranks):
                skipped.append((name, mesh, reason))
                continue
            for seed in range(seeds):
                scenarios.append(_scenario(name, mesh, shape, seed, config, num_ranks))
    return DrillPlan(scenarios=tuple(scenarios), skipped=tuple(skipped))


def _mesh_settings(mesh: str, num_ranks: int) -> tuple[str, ...]:
    """The settings of `parallel` for a mesh. Raises DrillError."""
    if mesh not in MESHES:
        raise DrillError(f"--mesh {mesh}: unknown; allowed are {', '.join(MESHES)}")
    if mesh == "config":
        return ()
    if "*" in mesh or mesh == "hsdp":
        if num_ranks < 4 or num_ranks % 2:
            raise DrillError(f"--mesh {mesh}: needs an even number of ranks, at least 4; there are {num_ranks}")
        half = num_ranks // 2
        sizes = {"hsdp": (2, half, 1, 1), "fsdp*tp": (1, half, 2, 1), "pp*fsdp": (1, half, 1, 2)}[mesh]
    else:
        sizes = {
            "ddp": (num_ranks, 1, 1, 1),
            "fsdp": (1, num_ranks, 1, 1),
            "tp": (1, 1, num_ranks, 1),
            "pp": (1, 1, 1, num_ranks),
        }[mesh]
    keys = ("dp_replicate", "dp_shard", "tp", "pp")
    return tuple(f"parallel.{key}={size}" for key, size in zip(keys, sizes, strict=True))


def _cannot(name: str, mesh: str, config: Config, num_ranks: int) -> str:
    """Reason why a scenario cannot be run on a mesh; empty if it can."""
    kinds = [] if name == CLEAN else [CATALOGUE[part] for part in name.split("+")]
    pipeline = mesh.startswith("pp") or (mesh == "config" and config.parallel.pp > 1)
    if any(kind.needs == "pipeline" for kind in kinds) and not pipeline:
        return "needs a pipeline (--mesh pp or pp*fsdp)"
    sizes = [getattr(config.parallel, dim) for dim in MESH_DIMS]
    has_parallel_groups = "*" in mesh or mesh == "hsdp" or (mesh == "config" and sum(size != 1 for size in sizes) > 1)
    if any(kind.needs == "groups" for kind in kinds) and not has_parallel_groups:
        return "needs a second group to compare with (--mesh hsdp or fsdp*tp)"
    if any(kind.needs == "ranks" for kind in kinds) and num_ranks < 2:
        return "needs more than one rank"
    has_one_data_rank = mesh in ("tp", "pp") or (
        mesh == "config" and config.parallel.dp_replicate * config.parallel.dp_shard * config.parallel.ep == 1
    )
    if any(kind.needs == "data ranks" for kind in kinds) and (num_ranks < 2 or has_one_data_rank):
        return "needs more than one data rank (--mesh ddp or fsdp)"
    return ""


def _scenario(name: str, mesh: str, shape: tuple[str, ...], seed: int, config: Config, num_ranks: int) -> Scenario:
    dice = random.Random(f"{seed} {mesh} {name}")
    names = [] if name == CLEAN else name.split("+")
    faults: list[Fault] = []
    step, steps = 0, 0 if names else _CLEAN_STEPS
    for kind_name in names:
        kind = CATALOGUE[kind_name]
        step = max(kind.first_step, step + _BETWEEN_STEPS if step else 0) + dice.randrange(_SPREAD_STEPS)
        faults.append(_fault(kind_name, kind, step, dice.randrange(num_ranks)))
        steps = max(steps, step + kind.steps_after)
    changed = {setting for part in names for setting in CATALOGUE[part].settings}
    settings = (*shape, f"train.steps={steps}", *_short(config), *sorted(changed))
    return Scenario(
        name=name,
        mesh=mesh,
        seed=seed,
        kinds=tuple(CATALOGUE[part] for part in names),
        faults=tuple(faults),
        steps=steps,
        settings=settings,
    )


def _fault(name: str, kind: Kind, step: int, rank: int) -> Fault:
    rank = kind.drilled_rank if kind.drilled_rank >= 0 else rank
    where = "" if kind.all_ranks else f",rank={rank}"
    more = f",{kind.parameters}" if kind.parameters else ""
    return parse_fault(f"{name}@step={step}{where}{more}")


def _short(config: Config) -> list[str]:
    """Settings that adapt the configuration of a long run to a short one."""
    settings = [f"checkpoint.interval={min(10, config.checkpoint.interval or 10)}"]
    if config.checkpoint.memory_interval:
        settings.append(f"checkpoint.memory_interval={min(5, config.checkpoint.memory_interval)}")
    settings.append(f"optim.warmup_steps={min(10, config.optim.warmup_steps)}")
    # Keep the learning rate constant, as at the start of a long run. The configured schedule would decay it to zero
    # within the few steps of a drill.
    settings.append("optim.schedule=constant")
    settings.append(f"recovery.max_restarts={max(3, config.recovery.max_restarts)}")
    return settings
