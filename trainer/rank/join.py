"""Join a run: the ranks' store, the run's folder and attempt, the manifest, and the recorder of this rank.

store = connect_store(identity)
run, attempt = join_run(identity, store, config, plan, faults=[])
recorder = make_recorder(identity, config, run, attempt, device)
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from probes.attach.launch.identity import Identity
from probes.attach.launch.watch_process import digest_address, start_detached_watch
from probes.fail_open import failing_open, probes_disabled
from probes.profiling.attach import profile_steps
from probes.recorder import NullRecorder, Recorder
from probes.tape import event_kinds
from probes.tape.run_facts import device_name, settings, versions
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from trainer.checkpoint import attempt_fence as fence
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.plan import Plan
from trainer.layout.resolve import resolve
from trainer.model.size import flops_per_token
from trainer.model.transformer import Transformer
from trainer.plan.manifest import planned
from trainer.torch_compat import PrefixStore, Store

__all__ = ["connect_store", "join_run", "make_recorder"]


def connect_store(identity: Identity) -> Store | None:
    """The store through which ranks find each other; None for a single process without a launcher."""
    if identity.world_size == 1 and "MASTER_ADDR" not in os.environ:
        return None
    try:
        store, _, _ = next(rendezvous("env://", rank=identity.rank, world_size=identity.world_size))
    except dist.DistNetworkError as error:
        where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        reason = "the port is in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
        raise ConfigError(f"{where}: {reason}. Choose another port, the same on every rank.") from None
    # torchrun's static rendezvous keeps one store over restarts, and addresses of ended ranks must not be found there.
    prefix = f"restart-{identity.restarts}" if identity.attempt < 0 else f"attempt-{identity.attempt}"
    return PrefixStore(f"rankscope/{prefix}", store)


def join_run(
    identity: Identity, store: Store | None, config: Config, plan: Plan, faults: list[str]
) -> tuple[RunDir, int]:
    """The run's folder and the attempt's number, the same on all ranks.

    `rankscope train` has claimed the attempt before it started any rank; under another launcher rank 0 does it here.
    """
    if identity.rank != 0:
        assert store is not None
        path, number = store.get("run").decode().rsplit("\n", 1)
        return RunDir(Path(path)), int(number)
    folder = os.environ.get("RANKSCOPE_RUN_DIR")
    found = RunDir.open(Path(folder)) if folder else _former_run(identity, config)
    if found is None:
        found = RunDir.create(Path(config.run.dir), name=config.run.name, manifest=_manifest(config, plan, faults))
    run = RunDir(found.path.resolve())
    attempt = identity.attempt if identity.attempt >= 0 else fence.claim(run, world_size=plan.world_size)
    if store is not None:
        store.set("run", f"{run.path}\n{attempt}")
    return run, attempt


def _former_run(identity: Identity, config: Config) -> RunDir | None:
    """Return the run that the same launcher (this process's parent) started in an earlier attempt. Needed for restarts
    under plain torchrun."""
    if not identity.restarts:
        return None
    manifests = Path(config.run.dir).glob("*/run.json")
    for path in sorted(manifests, key=lambda path: path.parent.name, reverse=True):
        run = RunDir(path.parent)
        if run.manifest().get("launcher_pid") == os.getppid():
            return run
    return None


def _manifest(config: Config, plan: Plan, faults: list[str]) -> dict[str, Any]:
    """The manifest of a run that another launcher starts."""
    return {
        "config": config.model_dump(mode="json"),
        "world_size": plan.world_size,
        "mesh": plan.sizes,
        "faults": faults,
        # Without a launcher, the parent is a shell, whose pid would not identify a run.
        "launcher_pid": os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0,
        "command": sys.argv,
    }


def make_recorder(identity: Identity, config: Config, run: RunDir, attempt: int, device: torch.device) -> Recorder:
    """Complete the manifest, start `watch` if no launcher has started it, and return this rank's recorder."""
    if identity.rank == 0:
        _complete_manifest(run, config, identity.world_size)
    if not config.probes.enabled or probes_disabled():
        return NullRecorder()
    recorder = TapeRecorder(
        run.rank_dir(attempt, identity.rank),
        rank=identity.rank,
        attempt=attempt,
        world_size=identity.world_size,
        local_rank=identity.local_rank,
        node_rank=identity.node_rank,
        device=str(device),
    )
    profile_steps(run, recorder, config.model_dump(include={"profiler"}), node_rank=identity.node_rank)
    if "RANKSCOPE_RUN_DIR" not in os.environ:
        if identity.rank == 0:
            recorder.event(event_kinds.ATTEMPT_STARTED, world_size=identity.world_size)
        if identity.local_rank == 0:
            with failing_open("watch"):  # a run without `watch` loses no record: the ranks write their own files
                num_nodes, digests = digest_address()
                start_detached_watch(run.path, identity.node_rank, num_nodes=num_nodes, digests=digests)
    return recorder


def _complete_manifest(run: RunDir, config: Config, world_size: int) -> None:
    """Add what only a rank knows: versions, the size of the model, and the plan's expectations."""
    with torch.device("meta"):
        model = Transformer(config.model)
    with contextlib.suppress(OSError):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        facts: dict[str, Any] = {
            "num_parameters": parameters,
            "flops_per_token": flops_per_token(config.model, config.data.seq_len),
            "versions": versions(),
            "environment": settings(),
        }
        on_cuda = torch.cuda.is_available() and config.train.device != "cpu"
        if on_cuda:
            facts |= device_name()
        facts["planned"] = planned(
            config, resolve(config, world_size), rank=0, device="cuda" if on_cuda else "cpu",
            device_name=str(facts.get("device_name", "")),
        )  # fmt: skip
        run.add_to_manifest(facts)
