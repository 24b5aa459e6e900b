"""`rankscope train`: from the command line to a run that trains, new or resumed, on one node or many.

    options = Options(config_path=Path("my.toml"), overrides=["train.steps=50"])
    code = launch_run(options, version="0.1.0", console=console)

Everything that can be checked is checked before anything starts. A mistake raises a ValueError with a one-line message.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from analyzers.wording import counted
from probes.attach.retention_line import retention_line
from probes.tape.rundir import RunDir
from probes.tape.typed_path import as_typed
from trainer.config.config import Config
from trainer.config.load import ConfigError, changed_config, check_trackers, load_config
from trainer.config.machine import check_machine, check_ranks_here, may_have_gpu
from trainer.config.paths import check_paths
from trainer.faults.options import parse_fault
from trainer.faults.possible import check_faults
from trainer.launcher.inputs import check_inputs, check_memory
from trainer.launcher.node import Node
from trainer.launcher.nodes.endpoint import host_and_port
from trainer.launcher.nodes.node_exclusion import count_failures, exclusion_path, exclusion_reason, reset_failure_counts
from trainer.launcher.remote_checkpoints import fetch_run
from trainer.launcher.resume import Resumed, check_finished, next_attempt, prepare, reset_guard
from trainer.launcher.supervise import supervise
from trainer.layout.plan import MESH_DIMS, Plan
from trainer.layout.resolve import fitting_world, resolve
from watch.digests.job_secret import create_job_secret

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.launcher.nodes.rendezvous import NodeRendezvous

__all__ = ["Options", "launch_run", "ranks_needed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of `rankscope train`."""

    config_path: Path | None = None
    overrides: list[str] = field(default_factory=list)
    nproc: int = 0
    """Ranks on this node; 0: as many as the mesh needs."""
    faults: list[str] = field(default_factory=list)
    resume: str | None = None
    """Folder of a run, or the address of a run's checkpoints."""
    force: bool = False
    nnodes: str = "1"
    node_rank: int = 0
    endpoint: str = ""


def launch_run(options: Options, *, version: str, console: Console) -> int:
    """Check, create or find the run, and train; returns the exit code."""
    if options.resume is not None and options.config_path is not None:
        given = f"not {options.config_path}. Change it with --set"
        raise ConfigError(f"--resume {options.resume} takes the run's own configuration, {given}.")
    if options.force and options.resume is None:
        raise ConfigError("--force needs --resume RUN.")
    for text in options.faults:
        parse_fault(text)
    node = _node(options)
    resumed, config = None, None
    if options.resume is None:
        config = load_config(options.config_path, options.overrides)
    elif node.rank == 0:  # other nodes get it from node 0
        folder = fetch_run(options.resume) if "://" in options.resume else Path(options.resume)
        resumed = prepare(folder, options.overrides, force=options.force)
        config = resumed.config
    elif "://" not in options.resume and not options.force:
        check_finished(Path(options.resume), options.overrides)
    if config is not None:
        check_trackers(config)
        check_machine(config, has_gpu=may_have_gpu())
        check_paths(config, base=_base(resumed))
    facts: dict[str, Any] = {"rankscope_version": version, "command": sys.argv, "start_over_at": None}
    if config is not None and not config.checkpoint.resume:
        # Only this launch starts over: its restarts, and later launches, continue from what it saves.
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": True})})
        facts["start_over_at"] = next_attempt(resumed.run) if resumed is not None else None
    if node.max_nodes > 1:
        return _on_nodes(config, resumed, node, options, facts, console)
    assert config is not None
    plan = resolve(config, options.nproc or _usual_size(config, resumed, options.overrides))
    check_ranks_here(config, plan.world_size)
    check_memory(config, plan, num_ranks=plan.world_size, on_host=_on_host(config))
    run = _run(config, plan, resumed, options, facts)
    return _train(run, config, plan, replace(node, nproc=plan.world_size), options, console)


def _on_host(config: Config) -> bool:
    """Return True if the ranks compute on the CPU."""
    return config.train.device == "cpu" or not may_have_gpu()


def _base(resumed: Resumed | None) -> Path:
    """Folder to which paths in the configuration are relative: the working folder of the run's first launch."""
    first = resumed.run.manifest().get("cwd") if resumed is not None else None
    return Path(first) if isinstance(first, str) else Path.cwd()


def ranks_needed(config: Config) -> int:
    """Number of ranks that the mesh needs. With a free dimension: the largest possible number of ranks with a GPU each,
    but at least the product of the other dimensions."""
    sizes = [getattr(config.parallel, dim) for dim in MESH_DIMS]
    fixed = 1
    for size in sizes:
        fixed *= max(1, size)
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*"))) if -1 in sizes else 0
    return max(fixed, gpus // fixed * fixed)


def _usual_size(config: Config, resumed: Resumed | None, overrides: list[str]) -> int:
    """Default number of ranks: the number in the last launch, unless the mesh has changed since."""
    changed = {override.partition("=")[0].strip() for override in overrides}
    if resumed is None or changed & {f"parallel.{dim}" for dim in MESH_DIMS}:
        return ranks_needed(config)
    return resumed.world_size


def _node(options: Options) -> Node:
    """This node as the options describe it. Raises ConfigError or NodeRendezvousError."""
    if options.nnodes == "1":
        if options.node_rank:
            raise ConfigError(f"--node-rank {options.node_rank}: one node has only index 0; several need --nnodes.")
        return Node(nproc=options.nproc)
    least, _, most = options.nnodes.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ConfigError(f"--nnodes {options.nnodes}: must be a number of nodes, or MIN:MAX with 1 <= MIN <= MAX.")
    host_and_port(options.endpoint)
    if options.node_rank >= int(most):
        raise ConfigError(f"--node-rank {options.node_rank}: --nnodes {options.nnodes} has nodes 0 to {int(most) - 1}.")
    return Node(
        nproc=options.nproc,
        rank=options.node_rank,
        min_nodes=int(least),
        max_nodes=int(most),
        endpoint=options.endpoint,
    )


def _on_nodes(
    config: Config | None,
    resumed: Resumed | None,
    node: Node,
    options: Options,
    facts: dict[str, Any],
    console: Console,
) -> int:
    """Launch one node of several. Node 0 creates or resumes the run, the other nodes get its folder and
    configuration."""
    if config is not None and node.rank == 0:
        node = replace(node, nproc=node.nproc or max(1, ranks_needed(config) // node.max_nodes))
        check_ranks_here(config, node.nproc)
        _largest_plan(config, node.nproc * node.min_nodes)  # checks that the minimum number of nodes has a layout
        largest = _largest_plan(config, node.nproc * node.max_nodes)
        check_memory(config, largest, num_ranks=node.nproc, on_host=_on_host(config))
    from trainer.launcher.nodes.rendezvous import NodeRendezvous  # imports torch: only now

    def make() -> Path:
        assert config is not None
        return _run(config, _largest_plan(config, node.nproc * node.max_nodes), resumed, options, facts).path

    rendezvous = NodeRendezvous(node, rejoin_s=config.recovery.rejoin_s if config is not None else 30.0)
    run = RunDir.open(rendezvous.agree_on_run(make))
    if reason := exclusion_reason(run, node.rank):
        path = exclusion_path(run, node.rank)
        raise ConfigError(
            f"Node {node.rank} is excluded from {run.path} ({reason}). Once it is repaired, delete {path}."
        )
    node = replace(node, failures=count_failures(run, node.rank))
    config = changed_config(run.private_manifest()["config"], [])
    node = replace(node, nproc=node.nproc or max(1, ranks_needed(config) // node.max_nodes))
    plan = _largest_plan(config, node.nproc * node.max_nodes)
    return _train(run, config, plan, node, options, console, rendezvous)


def _largest_plan(config: Config, num_ranks: int) -> Plan:
    """The layout that uses as many of `num_ranks` ranks as possible. Raises ConfigError if there is none."""
    return resolve(config, fitting_world(config, num_ranks) or num_ranks)


def _run(config: Config, plan: Plan, resumed: Resumed | None, options: Options, facts: dict[str, Any]) -> RunDir:
    """Return the run's folder, new or with this launch's manifest. Raises RunError and errors of earlier checks."""
    check_faults([parse_fault(text) for text in options.faults], config, plan)
    check_inputs(config, plan, on_host=_on_host(config))
    newest = facts | {
        "config": config.model_dump(mode="json"),
        "world_size": plan.world_size,
        "mesh": plan.sizes,
        "launcher_pid": os.getpid(),
    }
    if resumed is None:
        manifest = newest | {"faults": options.faults, "cwd": os.getcwd()}
        run = RunDir.create(Path(config.run.dir), name=config.run.name, manifest=manifest)
        create_job_secret(run)
        return run
    if options.force:
        reset_guard(resumed.run)
    reset_failure_counts(resumed.run, readmit=options.force)
    resumed.run.add_to_manifest(newest)
    create_job_secret(resumed.run)
    return resumed.run


def _train(
    run: RunDir,
    config: Config,
    plan: Plan,
    node: Node,
    options: Options,
    console: Console,
    rendezvous: NodeRendezvous | None = None,
) -> int:
    how = "resumed: " if options.resume is not None else ""
    where = f"node {node.rank}: " if node.max_nodes > 1 else ""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.sizes.items() if size > 1) or "one rank"
    up_to = "up to " if node.min_nodes < node.max_nodes else ""  # the number of nodes is known after the rendezvous
    ranks = f"{up_to}{counted(plan.world_size, 'rank')} ({mesh})"
    console.print(
        f"{where}{how}run [bold]{escape(as_typed(run.path))}[/]  {ranks}  {counted(config.train.steps, 'step')}",
        highlight=False,
    )
    if (first := run.manifest().get("start_over_at")) is not None:
        aside = escape(as_typed(run.checkpoints / f"before-attempt-{first}"))
        console.print(f"{where}starting over: earlier checkpoints move to {aside}", highlight=False, soft_wrap=True)
    if line := retention_line(config.model_dump(mode="json")):
        console.print(f"{where}{line}", highlight=False)
    return supervise(run, config, plan=plan, node=node, faults=options.faults, console=console, rendezvous=rendezvous)
