"""Load initial weights from safetensors files with Hugging Face's Llama names, or written by `rankscope export`.

    load_weights(model, Path("Llama-3.2-1B"))        # a folder, or one .safetensors file

Each rank reads the files that contain its parts of the model, one tensor at a time, and keeps its shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config.load import ConfigError
from trainer.error_text import first_line
from trainer.model.llama_names import from_llama
from trainer.model.own_region import own_region

__all__ = ["check_weights", "load_weights"]

_INDEX = "model.safetensors.index.json"


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> None:
    """Fill every parameter of `model`, which may be sharded or a pipeline stage. Raises ConfigError, one line."""
    for parameter, stored in _found(model, path):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.numel():
            local.copy_(stored[own_region(parameter)])


def check_weights(model: nn.Module, path: Path) -> None:
    """Check that every parameter of `model` (which may be on the meta device) exists in the files, without reading
    values. Raises ConfigError.
    """
    for _ in _found(model, path):
        pass


def _found(model: nn.Module, path: Path) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield each parameter with the lazily read slice of a file that has its values."""
    where = _tensors(path)
    opened: dict[Path, Any] = {}
    for name, parameter in model.named_parameters():
        found = where.get(name)
        if found is None and name == "head.weight":
            found = where.get("embed.weight")  # the file ties the head to the embedding and stores only the latter
        if found is None:
            raise ConfigError(f"model.weights = {str(path)!r}: {name} not found")
        file, theirs = found
        if file not in opened:
            opened[file] = safe_open(file, framework="pt")
        stored = opened[file].get_slice(theirs)
        shape = torch.Size(stored.get_shape())
        if shape != parameter.shape:
            raise ConfigError(
                f"model.weights = {str(path)!r}: {theirs} is {_sized(shape)}, "
                f"the configuration's model has {_sized(parameter.shape)}"
            )
        yield parameter, stored


def _tensors(path: Path) -> Mapping[str, tuple[Path, str]]:
    """{parameter name: (file, name in the file)}."""
    try:
        if path.is_dir() and (path / _INDEX).is_file():
            listed = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = sorted({path / Path(name).name for name in listed.values()})
        elif path.is_dir():
            files = sorted(path.glob("*.safetensors"))
        else:
            files = [path]
        found: dict[str, tuple[Path, str]] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (no mapping)
                    found[from_llama(name) or name] = (file, name)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.weights = {str(path)!r}: cannot be read ({first_line(error)})") from None
    if not found:
        raise ConfigError(f"model.weights = {str(path)!r}: no .safetensors file found")
    return found


def _sized(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))
