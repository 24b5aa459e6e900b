"""Load of the experts of a mixture: experts that get too many tokens, hardly any, or drop some.

1. Load of an expert in a sample: the tokens that the router assigned to the expert, summed over the ranks, divided by
   an even share of the layer's tokens. A load of 1 is even; if one of eight experts gets all tokens, its load is 8.
2. Hot: far above an even share in most samples of the newest window. The ranks that have the expert do more work than
   their peers, who wait for them; with a capacity it drops tokens.
3. Dead: next to nothing over the whole window. Its weights occupy memory, but it learns nothing.
4. Dropped: a large part of all assignments over the window exceeded the capacity of their expert.

At most one finding per cause, for the newest attempt: it names the worst expert and the number of others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analyzers.finding import Finding
from analyzers.numerics.policy import ExpertLoadPolicy
from analyzers.policy import SHARED
from analyzers.scope import Scope
from analyzers.source import Floats, Ints, Source, ints, missing_tables
from analyzers.wording import ranks_text
from probes.settings.described import ModelFacts
from probes.settings.section import read

__all__ = ["LayerLoad", "expert_load", "layer_loads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One layer in the newest samples, over all ranks."""

    layer: int
    steps: Ints
    """Steps of the samples, ascending."""
    tokens: Floats
    """(samples, experts): tokens that the router assigned."""
    dropped: Floats
    """(samples, experts): assigned tokens beyond the capacity."""

    @property
    def load(self) -> Floats:
        """(samples, experts) relative to an even share of the sample; NaN if no token was assigned."""
        whole = self.tokens.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            return np.where(whole > 0, self.tokens * self.tokens.shape[1] / np.maximum(whole, 1), np.nan)

    @property
    def mean_load(self) -> Floats:
        """(experts,) over all samples together."""
        whole: Floats = self.tokens.sum(axis=0)
        return whole * len(whole) / max(1.0, float(whole.sum()))


def layer_loads(source: Source, window_samples: int, scope: Scope = Scope()) -> tuple[int | None, list[LayerLoad]]:
    """The newest attempt that has samples, and its layers in the newest `window_samples` samples."""
    if missing_tables(source, "experts"):
        return None, []
    ((attempt,),) = source.rows(
        "SELECT max(attempt) FROM experts WHERE attempt = coalesce(?, attempt) AND step >= ?",
        [scope.attempt, scope.since_step],
    )
    if attempt is None:
        return None, []
    table = source.query(
        """
        WITH newest AS (SELECT DISTINCT step FROM experts WHERE attempt = ? AND step >= ? ORDER BY step DESC LIMIT ?)
        SELECT layer, step, expert, CAST(sum(tokens) AS BIGINT) AS tokens, CAST(sum(dropped) AS BIGINT) AS dropped
        FROM experts SEMI JOIN newest USING (step) WHERE attempt = ? GROUP BY layer, step, expert
        """,
        [attempt, scope.since_step, window_samples, attempt],
    )
    layers, steps, experts = ints(table["layer"]), ints(table["step"]), ints(table["expert"])
    found = []
    for layer in np.unique(layers):
        in_layer = layers == layer
        sampled, row = np.unique(steps[in_layer], return_inverse=True)
        shape = (len(sampled), int(experts[in_layer].max()) + 1)
        tokens, dropped = np.zeros(shape), np.zeros(shape)
        tokens[row, experts[in_layer]] = ints(table["tokens"])[in_layer]
        dropped[row, experts[in_layer]] = ints(table["dropped"])[in_layer]
        found.append(LayerLoad(layer=int(layer), steps=sampled, tokens=tokens, dropped=dropped))
    return int(attempt), found


def expert_load(source: Source, scope: Scope, policy: ExpertLoadPolicy = ExpertLoadPolicy()) -> list[Finding]:
    """At most one finding for each cause; none for a model without experts.

    The number of experts per token is in the manifest; without it 1 is assumed.
    """
    per_token = read(ModelFacts, scope.manifest).experts_per_token or 1.0
    attempt, layers = layer_loads(source, SHARED.window_samples, scope)
    if attempt is None:
        if not read(ModelFacts, scope.manifest).num_experts:
            return []
        return [_insufficient("no loads of experts were recorded", None)]
    if max(len(layer.steps) for layer in layers) < SHARED.min_times:
        return [_insufficient(f"there are fewer than {SHARED.min_times} samples", attempt)]
    found = [
        _hot(source, attempt, layers, per_token, policy),
        _dead(attempt, layers),
        _dropped(attempt, layers),
    ]
    return [finding for finding in found if finding is not None]


def _insufficient(why: str, attempt: int | None) -> Finding:
    summary = f"The load of the experts was not checked: {why} (probes.expert_interval)."
    return Finding.insufficient("expert_load", "expert_imbalance", summary, attempt=attempt)


def _hot(
    source: Source, attempt: int, layers: list[LayerLoad], per_token: float, policy: ExpertLoadPolicy
) -> Finding | None:
    limit = min(SHARED.clear_factor, policy.highest_ratio * layers[0].tokens.shape[1] / per_token)
    hot = [
        (float(layer.mean_load[expert]), layer, int(expert))
        for layer in layers
        for expert in np.flatnonzero((layer.load >= limit).mean(axis=0) >= SHARED.explained_ratio)
    ]
    if not hot:
        return None
    load, layer, expert = max(hot, key=lambda one: one[0])
    ranks = _ranks_of(source, attempt, expert, layer.tokens.shape[1])
    where = f" on {ranks_text(ranks)}" if ranks else ""
    return _finding(
        "hot",
        attempt,
        layer,
        f"Expert {expert} of block {layer.layer}{where} gets {load:.1f}x an even share of the tokens",
        _more(len(hot), "hot"),
        {"layer": layer.layer, "expert": expert, "load_ratio": round(load, 3), "num_experts_hot": len(hot),
         "limit_ratio": round(limit, 3)},
        ranks,
    )  # fmt: skip


def _dead(attempt: int, layers: list[LayerLoad]) -> Finding | None:
    dead = [
        (float(layer.mean_load[expert]), layer, int(expert))
        for layer in layers
        for expert in np.flatnonzero(layer.mean_load < SHARED.saving_ratio)
    ]
    if not dead:
        return None
    load, layer, expert = min(dead, key=lambda one: one[0])
    return _finding(
        "dead",
        attempt,
        layer,
        f"Expert {expert} of block {layer.layer} gets {100 * load:.1f} % of an even share of the tokens",
        _more(len(dead), "unused"),
        {"layer": layer.layer, "expert": expert, "load_ratio": round(load, 4), "num_experts_dead": len(dead),
         "limit_ratio": SHARED.saving_ratio},
    )  # fmt: skip


def _dropped(attempt: int, layers: list[LayerLoad]) -> Finding | None:
    def share(layer: LayerLoad) -> float:
        return float(layer.dropped.sum() / max(1.0, layer.tokens.sum()))

    worst = max(layers, key=share)
    over_all = sum(float(layer.dropped.sum()) for layer in layers) / max(
        1.0, sum(float(layer.tokens.sum()) for layer in layers)
    )
    if over_all < SHARED.cost_ratio:
        return None
    return _finding(
        "dropped",
        attempt,
        worst,
        f"{100 * over_all:.0f} % of the token-to-expert assignments were dropped because experts were full, most in "
        f"block {worst.layer} ({100 * share(worst):.0f} %)",
        "",
        {"dropped_ratio": round(over_all, 4), "worst_layer": worst.layer, "worst_ratio": round(share(worst), 4),
         "limit_ratio": SHARED.cost_ratio},
    )  # fmt: skip


def _ranks_of(source: Source, attempt: int, expert: int, num_experts: int) -> tuple[int, ...]:
    """The ranks that have an expert, if experts are divided over `ep` and `tp`; empty if all ranks have it."""
    if missing_tables(source, "ranks"):
        return ()
    places = source.rows(
        "SELECT rank, arg_max(ep, wall_ns), coalesce(arg_max(tp, wall_ns), 0) FROM ranks "
        "WHERE attempt = ? AND rank >= 0 AND ep IS NOT NULL GROUP BY rank ORDER BY rank",
        [attempt],
    )
    ep, tp = (max((place[dim] for place in places), default=0) + 1 for dim in (1, 2))
    if ep * tp == 1 or num_experts % (ep * tp):
        return ()
    holder = expert // (num_experts // (ep * tp))
    return tuple(int(rank) for rank, *place in places if place[0] * tp + place[1] == holder)


def _more(count: int, what: str) -> str:
    return f" {count - 1} more {'is' if count == 2 else 'are'} {what}." if count > 1 else ""


def _finding(
    cause: str,
    attempt: int,
    layer: LayerLoad,
    summary: str,
    more: str,
    evidence: dict[str, float | int],
    ranks: tuple[int, ...] = (),
) -> Finding:
    return Finding(
        analyzer="expert_load",
        kind="expert_imbalance",
        severity="warning",
        status="fired",
        ranks=ranks,
        first_step=int(layer.steps[0]),
        last_step=int(layer.steps[-1]),
        cause=cause,
        summary=f"{summary}, in steps {layer.steps[0]} to {layer.steps[-1]}.{more}",
        evidence={**evidence, "num_samples": len(layer.steps)},
        advice=f"expert-imbalance-{cause}",
        attempt=attempt,
    )
