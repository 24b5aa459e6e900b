"""Initial weights: each rank draws only its shards, with the same values as in any other layout.

    initialise(model, config.model, seed=0)

A parameter is covered by tiles of `TILE_ROWS` x `TILE_COLUMNS` elements. The generator of each tile is seeded with the
run's seed, the parameter's name and the tile's position. A rank draws every tile that overlaps its part. In addition to
its shards it needs memory for its part of one parameter.
"""

from __future__ import annotations

import hashlib
import itertools
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.config.model import ModelConfig
from trainer.model.own_region import own_region
from trainer.model.transformer import Transformer

__all__ = ["initialise"]

TILE_ROWS = 32
TILE_COLUMNS = 512
DEVIATION = 0.02


@torch.no_grad()
def initialise(model: Transformer, config: ModelConfig, seed: int) -> None:
    """Draw every parameter of `model`, which may be sharded or a pipeline stage. No communication.

    Weights are normal with standard deviation 0.02, scaled by 1 / sqrt(2 layers) for projections that write into the
    residual stream (GPT-2's rule); norms are ones.
    """
    residual = DEVIATION / math.sqrt(2 * config.num_layers)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.dim() == 1:
            local.fill_(1.0)
            continue
        is_residual = name.endswith(("attention.out.weight", "mlp.down.weight", "experts.down"))
        drawn = _normal(f"{seed}/{name}", own_region(parameter))
        local.copy_(drawn.mul_(residual if is_residual else DEVIATION))


def _normal(name: str, region: tuple[slice, ...]) -> Tensor:
    """Draw standard normal numbers for a region of a parameter, on the host, from the tiles that cover the region."""
    out = torch.empty([part.stop - part.start for part in region])
    *leading, rows, columns = region
    generator = torch.Generator()
    for place in itertools.product(*(range(part.start, part.stop) for part in leading)):
        matrix = out[tuple(number - part.start for number, part in zip(place, leading, strict=True))]
        for row, column in itertools.product(_tiles(rows, TILE_ROWS), _tiles(columns, TILE_COLUMNS)):
            digest = hashlib.sha256(f"{name}/{place}/{row}/{column}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:7], "little"))
            tile = torch.randn(TILE_ROWS, TILE_COLUMNS, generator=generator)
            (to_rows, from_rows), (to_columns, from_columns) = (
                _shared(rows, row, TILE_ROWS),
                _shared(columns, column, TILE_COLUMNS),
            )
            matrix[to_rows, to_columns] = tile[from_rows, from_columns]
    return out


def _tiles(part: slice, size: int) -> range:
    """Starts of the tiles that overlap a part of a dimension."""
    return range(part.start - part.start % size, part.stop, size)


def _shared(part: slice, start: int, size: int) -> tuple[slice, slice]:
    """Intersection of a part and a tile in one dimension, as a slice of the part and as a slice of the tile."""
    first, last = max(part.start, start), min(part.stop, start + size)
    return slice(first - part.start, last - part.start), slice(first - start, last - start)
