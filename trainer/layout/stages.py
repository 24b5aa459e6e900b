"""Assignment of layers to pipeline stages, and of stages to ranks.

    split_layers(8, pp=2, per_rank=2, style="loop", costs=[]).layers   # ((0, 1), (2, 3), (4, 5), (6, 7))

`loop`: rank r has the stages r, r + pp, ... `v`: rank r has the stages r and 2 pp - 1 - r, so that the first and
the last stage are on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Stages", "split_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Layers by stage and stages by pipeline rank."""

    layers: tuple[tuple[int, ...], ...]
    of_rank: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.layers)


def split_layers(num_layers: int, pp: int, per_rank: int, style: str, costs: list[float]) -> Stages:
    """Cut `num_layers` into `pp * per_rank` runs of neighbours so that the dearest stage is as cheap as it can be.

    `costs` is one number a layer; empty means equal layers.
    """
    count = pp * per_rank
    layers = _cheapest_cut(costs or [1.0] * num_layers, count)
    if style == "v":
        of_rank: tuple[tuple[int, ...], ...] = tuple((rank, count - 1 - rank) for rank in range(pp))
    else:
        of_rank = tuple(tuple(range(rank, count, pp)) for rank in range(pp))
    return Stages(layers=layers, of_rank=of_rank)


def _cheapest_cut(costs: list[float], count: int) -> tuple[tuple[int, ...], ...]:
    """Dynamic programming: best[k][j] = lowest (dearest stage, sum of squares) for the first j layers in k stages."""
    size = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    never = (float("inf"), float("inf"))
    best = [[never] * (size + 1) for _ in range(count + 1)]
    cut = [[0] * (size + 1) for _ in range(count + 1)]
    best[0][0] = (0.0, 0.0)
    for stage in range(1, count + 1):
        for last in range(stage, size + 1):
            for first in range(stage - 1, last):
                before, cost = best[stage - 1][first], total[last] - total[first]
                # The sum of squares spreads what is left: 3 3 2 2 layers, not 3 3 3 1.
                candidate = (max(before[0], cost), before[1] + cost * cost)
                # On a tie the later cut: early stages take the extra layer, the head makes the last stage dear.
                if candidate <= best[stage][last]:
                    best[stage][last], cut[stage][last] = candidate, first
    bounds, last = [size], size
    for stage in range(count, 0, -1):
        last = cut[stage][last]
        bounds.append(last)
    bounds.reverse()
    return tuple(tuple(range(bounds[i], bounds[i + 1])) for i in range(count))
