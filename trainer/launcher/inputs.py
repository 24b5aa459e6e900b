"""Open the data, weights and addresses of a run in the launcher, before the run has a folder.

    check_inputs(config, plan, on_host=True)         # raises ConfigError, one line

Paths are relative to the current folder. Only the data's cache is kept, since the ranks need it, too.
"""

from __future__ import annotations

from pathlib import Path

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.plan import Plan
from trainer.layout.step_verdict import reason_to_read_at_once

__all__ = ["check_inputs"]


def check_inputs(config: Config, plan: Plan, *, on_host: bool) -> None:
    """Raise ConfigError for data, weights, addresses or ranks that do not exist."""
    _check_ranks(config, plan, on_host=on_host)
    _check_data(config)
    _check_weights(config)
    _check_address(config.checkpoint.remote)
    _check_metrics(config)


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
