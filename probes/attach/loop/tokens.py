"""Tokens per batch and FLOPs per token, from the shapes of the user's language model.

    num_tokens(args, kwargs)         # 4096: the token ids that a call of the model is given
    num_padded(args, kwargs)         # 1024: those that its attention mask leaves out
    flops_per_token(model)           # 6 x the weights that multiply each token; None if they are not visible
    store_flops_per_token(run, [model])                  # in run.json

A model counts as a language model if it looks up embeddings and is called with integers of two or more dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...tape.rundir import RunDir
from ..launch.mesh import pipeline_stages

__all__ = ["flops_per_token", "looks_up_tokens", "num_padded", "num_tokens", "store_flops_per_token"]

_INTEGERS = (torch.int64, torch.int32)


def looks_up_tokens(model: nn.Module) -> bool:
    """Return True if it has an embedding."""
    return any(map(_is_embedding, model.modules()))


def _is_embedding(part: nn.Module) -> bool:
    """Return True for torch's embedding, and for classes named after it that hold a table: Megatron's and others."""
    weight = part._parameters.get("weight") if "Embedding" in type(part).__name__ else None
    return isinstance(part, nn.Embedding) or (weight is not None and weight.dim() == 2)


def num_tokens(args: Any, kwargs: Mapping[str, Any]) -> int:
    """Count the ids of the first integer tensor with a dimension besides the batch; 0 if there is no such tensor."""
    for value in _inputs(args, kwargs):
        if isinstance(value, Tensor) and value.dtype in _INTEGERS and value.dim() >= 2:
            return value.numel()
    return 0


def num_padded(args: Any, kwargs: Mapping[str, Any]) -> int | Tensor:
    """Count the positions that a 0/1 mask with one number per id leaves out; does not wait for a device. 0 without such
    a mask: packed sequences have none, and separate documents by positions.
    """
    for given in (kwargs, *(value for value in args if isinstance(value, Mapping))):
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype in (*_INTEGERS, torch.bool):
            padded = mask.numel() - mask.sum()
            return int(padded) if padded.is_cpu else padded
    return 0


def _inputs(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    yield kwargs.get("input_ids")
    for value in (*(args if isinstance(args, tuple) else (args,)), *kwargs.values()):
        if not isinstance(value, Tensor) and isinstance(value, Mapping):  # the second check is slow
            yield value.get("input_ids")
            yield from value.values()
        else:
            yield value


def flops_per_token(model: nn.Module) -> int | None:
    """FLOPs of forward and backward per token in the weights, without attention's own matrix products. None if the
    model looks up no tokens, or if its parameters are flattened so that no matrix is visible.
    """
    if not looks_up_tokens(model):
        return None
    looked_up = {id(part.weight) for part in model.modules() if _is_embedding(part)}
    multiplied = {id(part.weight) for part in model.modules() if isinstance(part, nn.Linear)}
    weights = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.dim() >= 2 and (id(parameter) not in looked_up or id(parameter) in multiplied)
    )
    return 6 * weights or None


def store_flops_per_token(run: RunDir, models: Sequence[nn.Module]) -> None:
    """Store the FLOPs per token in run.json, unless there are several models or only a part of one."""
    if len(models) != 1 or pipeline_stages():
        return
    counted = flops_per_token(models[0])
    if counted is not None and "flops_per_token" not in run.manifest():
        run.add_to_manifest({"flops_per_token": counted})
