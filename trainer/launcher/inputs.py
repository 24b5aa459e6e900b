"""Open the data, weights and addresses of a run in the launcher, before the run has a folder.

    check_memory(config, plan, num_ranks=4, on_host=True)       # raises ConfigError, one line
    check_inputs(config, plan, on_host=True)

Paths are relative to the current folder. Nothing that is opened is kept, except the cache of the data, which the ranks
need, too.
"""

from __future__ import annotations

import math
from pathlib import Path

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.plan import Plan
from trainer.layout.step_verdict import reason_to_read_at_once
from trainer.model.size import num_parameters
from watch.health.host import Host

__all__ = ["check_inputs", "check_memory"]

_PROCESS_BYTES = 16 << 20
"""Memory of a forked rank or data worker before it holds anything: measured with torch 2.13, 17 MB and page tables."""
_STATE_BYTES = {"adamw": 16, "muon": 12, "adamw8bit": 10}
"""Minimum bytes per parameter for the parameter, its gradient and its moments, by optimizer."""
_TOKEN_BYTES = 16  # per token: an input and a target, both int64
_ANGLE_BYTES = 4  # per number of a head: cosine and sine are float32, and each has half as many numbers as a head


def check_inputs(config: Config, plan: Plan, *, on_host: bool) -> None:
    """Raise ConfigError for data, weights, addresses or ranks that do not exist."""
    _check_ranks(config, plan, on_host=on_host)
    _check_data(config)
    _check_weights(config)
    _check_address(config.checkpoint.remote)
    _check_metrics(config)


def check_memory(config: Config, plan: Plan, *, num_ranks: int, on_host: bool) -> None:
    """Raise ConfigError if `num_ranks` ranks of `plan` certainly need more memory than this host has.

    The kernel would kill them. `on_host`: ranks compute on the CPU, so their state is in host memory. Activations are
    not counted.
    """
    available = Host(Path.cwd()).read()[0].values.get("memory_total_bytes", math.inf)
    workers, count = config.data.num_workers, num_parameters(config.model)
    # The shards and stages of all ranks add up to one copy per replica. ZeRO-1 shares the moments among replicas.
    state = 8 if plan.zero1 else _STATE_BYTES[config.optim.name]
    state *= count * plan.dp_replicate * num_ranks // plan.world_size if on_host else 0
    tokens = num_ranks * plan.local_batch_size * config.data.seq_len * _TOKEN_BYTES
    ahead = tokens * workers * config.data.prefetch
    angles = num_ranks * config.model.max_seq_len * (config.model.dim // config.model.num_heads) * _ANGLE_BYTES
    needs = {
        f"model with {count:,} parameters: these, gradients and moments": (
            state, "use GPUs, more hosts or a smaller model"),
        f"model.max_seq_len = {config.model.max_seq_len}: the rotary angles": (angles, "lower it"),
        f"train.global_batch_size = {config.train.global_batch_size}: the tokens": (tokens, "lower it"),
        f"data.prefetch = {config.data.prefetch}: the batches": (ahead, "two or four are usual"),
        f"--nproc-per-node {num_ranks}: the processes": (num_ranks * _PROCESS_BYTES, "start fewer ranks"),
        f"data.num_workers = {workers}: the processes": (
            num_ranks * workers * _PROCESS_BYTES, "one or two per rank are usual"),
    }  # fmt: skip
    if sum(need for need, _ in needs.values()) > available:
        what, (need, advice) = max(needs.items(), key=lambda item: item[1][0])
        raise ConfigError(
            f"{what} of {num_ranks} rank{'s' * (num_ranks > 1)} need at least {need / 2**30:,.0f} GiB of memory, and "
            f"this host has {available / 2**30:,.0f}; {advice}"
        )


def _check_ranks(config: Config, plan: Plan, *, on_host: bool) -> None:
    if config.recovery.verdict == "late" and (reason := reason_to_read_at_once(config, plan, on_host=on_host)):
        raise ConfigError(f"recovery.verdict = 'late': {reason}; must be auto or at_once")
    profiler = config.profiler
    if profiler.interval and (missing := [rank for rank in profiler.ranks if not 0 <= rank < plan.world_size]):
        raise ConfigError(f"profiler.ranks = {profiler.ranks}: there is no rank {missing[0]} of {plan.world_size}")


def _check_data(config: Config) -> None:
    from trainer.data.corpus import open_corpus
    from trainer.data.streams import training_stream, validation_streams
    from trainer.data.token_folder import DataError

    try:
        corpus = open_corpus(config.data, config.model.vocab_size)
        training_stream(config, corpus)
        validation_streams(config, corpus)
    except DataError as error:
        raise ConfigError(str(error)) from None


def _check_weights(config: Config) -> None:
    if not config.model.weights:
        return
    import torch

    from trainer.model.transformer import Transformer
    from trainer.model.weights import check_weights

    with torch.device("meta"):
        check_weights(Transformer(config.model), Path(config.model.weights).expanduser())


def _check_address(remote: str) -> None:
    if not remote:
        return
    from trainer.checkpoint.remote.address import RemoteError, RemoteFolder

    try:
        RemoteFolder(remote)
    except RemoteError as error:
        raise ConfigError(f"checkpoint.remote = {error}") from None


def _check_metrics(config: Config) -> None:
    from watch.exporting.prometheus.endpoint import listen_address
    from watch.exporting.prometheus.server import ListenError

    try:
        if listen := listen_address({"config": {"metrics": config.metrics.model_dump()}}):
            listen.check()
    except ListenError as error:
        raise ConfigError(f"metrics.listen: {error}") from None
