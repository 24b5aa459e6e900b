"""Training state: tensors by name, and a few plain values that are the same on every rank.

    tensors = training_tensors(training)            # live: "model.blocks.0.mlp.up.weight", "optimizer.<name>.exp_avg"
    values = Values(position=Position(step=40, batch_index=41), scaler=None, detector={...})

Parameters have the same names in every parallel layout, so a state can be loaded in another layout. Sharded tensors are
DTensors, which record the part of the full tensor that they hold.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from probes.guard.position import Position
from trainer.config.load import ConfigError
from trainer.training.optimizer import empty_state, optimizer_state, state_keys, updated_here
from trainer.training.rank_training import Training

__all__ = [
    "Position",
    "Values",
    "allocate_optimizer_state",
    "local_tensors",
    "restore_rng",
    "rng_state",
    "training_tensors",
]


_STATE_KEYS = (
    "exp_avg", "exp_avg_sq", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales",
    "momentum_buffer", "step",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """State other than tensors."""

    position: Position
    scaler: Mapping[str, float] | None = None
    detector: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, loaded: Mapping[str, Any]) -> Values:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for malformed values."""
        position = {key: int(loaded["position"][key]) for key in ("step", "batch_index")}
        return cls(position=Position(**position), scaler=loaded["scaler"], detector=dict(loaded["detector"]))


def training_tensors(training: Training) -> dict[str, Tensor]:
    """This rank's parameters, optimizer state, and error feedback of gradient compression, uncopied, in a fixed order.

    The parameters come first, so that the n-th tensor is the same parameter on all replicas, which are compared in this
    order (`trainer.guard.integrity`). Under ZeRO-1, each replica holds the optimizer state of other parameters.
    """
    tensors: dict[str, Tensor] = {}
    parameters = list(training.named_parameters())  # this walks over all modules, so do it only once
    for name, parameter in parameters:
        tensors[f"model.{name}"] = parameter.detach()
    state = optimizer_state(training.optimizer)
    for name, parameter in parameters:
        for key, value in sorted(state.get(parameter, {}).items()):
            tensors[f"optimizer.{name}.{key}"] = value
    for compression in training.compressions:
        tensors |= compression.tensors()
    return tensors


def local_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in this rank's memory: a DTensor's local shard, others as they are."""
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in tensors.items()}


def allocate_optimizer_state(training: Training, saved: Mapping[str, Any]) -> None:
    """Allocate the optimizer state tensors named in `saved`, for the loader to fill.

    Under ZeRO-1, only for parameters that this rank updates. Raises ConfigError for the state of another optimizer.
    """
    for compression in training.compressions:
        compression.allocate(saved)
    state, own = optimizer_state(training.optimizer), updated_here(training.optimizer)
    state.clear()
    for name, parameter in training.named_parameters():
        if parameter not in own:
            continue
        own_keys = state_keys(training.optimizer, parameter)
        for key in [key for key in _STATE_KEYS if f"optimizer.{name}.{key}" in saved]:
            if key not in own_keys:
                raise ConfigError(
                    f"optim.name = {training.config.optim.name!r}: the state was saved with another optimizer, which "
                    f"kept {key} of {name}; use the one with which the run started"
                )
            state[parameter][key] = empty_state(training.optimizer, parameter, key)


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of all random generators of this process, as tensors."""
    _, words, place, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_rest": torch.tensor([float(version), gauss or 0.0, float(gauss is not None)], dtype=torch.float64),
        "numpy": torch.from_numpy(np.asarray(words).astype(np.int64)),
        "numpy_rest": torch.tensor([float(place), float(has_gauss), float(cached)], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Set all random generators to the states that `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, gauss, has_gauss = state["python_rest"].tolist()
    random.setstate((int(version), tuple(state["python"].tolist()), gauss if has_gauss else None))
    place, has_numpy_gauss, cached = state["numpy_rest"].tolist()
    words = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(place), int(has_numpy_gauss), cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
