"""Mixture-of-experts feed-forward layer: a router sends each token to its highest-scoring experts.

    layer = MixtureOfExperts(config.model)          # in place of FeedForward
    layer.group = group                             # each rank in it has some of the experts; None: this rank has all
    layer.pieces = group                            # each rank in it has a piece of every sequence; None: no pieces
    out = layer(x)                                  # (batch, seq or piece, dim), as FeedForward
    layer.take_load()                               # tokens and dropped tokens of each expert since the last call

The router's probabilities are those of Shazeer et al. 2017 in float32. If a token has several experts, their
probabilities are scaled to sum to one. There are two auxiliary losses. The balance loss (Fedus et al. 2021) is the
number of experts x the sum over experts of (share of tokens x mean probability), which is 1 if all experts are used
equally. The router's z-loss (Zoph et al. 2022) is the squared logsumexp of its logits. The reported loss contains
neither. Their gradients are added in backward at the layer's output, in every pipeline stage.

Balance and capacity are computed per sequence (as in DeepSeek-V3's sequence-wise loss). So losses and dropped tokens do
not depend on how ranks and microbatches divide the batch, and all layouts train the same way. An expert drops tokens
over its capacity. Earlier tokens of the sequence have priority, so routing is causal.

With expert choice (Zhou et al. 2022, arXiv 2202.09368) each expert takes its highest-scoring tokens of a sequence, up
to its capacity. The router's probabilities weight them, and no balancing is needed. Whether a token is taken depends on
later tokens, so a causal model trains with information that it lacks at generation.

Ranks with pieces of a sequence exchange how often each expert was chosen. The balance loss needs no more: it is linear
in the probabilities, and each rank adds its own tokens' part. With expert choice, ranks exchange the probabilities.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from trainer.config.model import ModelConfig
from trainer.model.exchange import Route, exchange, scaled_gradient
from trainer.torch_compat import graph_task_id

__all__ = ["Experts", "MixtureOfExperts"]

# `all_gather_single` is the name from torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_IGNORED_BITS = 13
"""Number of mantissa bits that are ignored, so that probabilities count as equal if their relative difference is below
a thousandth."""


class Experts(nn.Module):
    """The feed-forward layers of all experts, stacked. Under expert parallelism a rank has a part of the stack."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, dim, hidden = config.num_experts, config.dim, config.expert_ffn_dim
        self.grouped = config.expert_products == "grouped"
        self.gate = nn.Parameter(torch.empty(count, hidden, dim))
        self.up = nn.Parameter(torch.empty(count, hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))

    def forward(self, tokens: Tensor, counts: list[int], gradient_scale: float) -> Tensor:
        """Apply the experts to `tokens` (rows, dim), which are sorted by expert; `counts`: number of rows of each
        expert. Returns (rows, dim).
        """
        gate, up, down = (
            scaled_gradient(weight.to_local() if isinstance(weight, DTensor) else weight, gradient_scale)
            for weight in (self.gate, self.up, self.down)
        )
        if self.grouped:
            return _grouped_feed_forward(tokens, counts, gate, up, down)
        parts = zip(torch.split(tokens, counts), gate.unbind(), up.unbind(), down.unbind(), strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) for x, g, u, d in parts])


def _grouped_feed_forward(tokens: Tensor, counts: list[int], gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts in three grouped matmuls, each with one matrix per expert."""
    kind = tokens.device.type
    # torch does not autocast grouped_mm
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tokens.dtype
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=tokens.device)

    def matmul(rows: Tensor, weights: Tensor) -> Tensor:
        return F.grouped_mm(rows.to(dtype), weights.to(dtype).transpose(1, 2), offs=ends)

    return matmul(F.silu(matmul(tokens, gate)) * matmul(tokens, up), down)


class MixtureOfExperts(nn.Module):
    """Router, experts, and the exchange of tokens between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.chosen = config.num_experts, config.experts_per_token
        self.capacity_factor = config.capacity_factor
        self.experts_choose = config.expert_routing == "expert"
        self.balance_loss, self.z_loss = config.balance_loss, config.router_z_loss
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.group: dist.ProcessGroup | None = None
        """Group of ranks among which the experts are divided; each rank sends its tokens. None: this rank has all."""
        self.gradient_scale = 1.0
        """Scale of an expert's gradient, which is a sum over the group: 1 / number of mean losses in the group."""
        self.pieces: dist.ProcessGroup | None = None
        """Group of ranks that each have a piece of every sequence, in the order of the pieces. None: no pieces."""
        self.loss_share = 1.0
        """This rank's tokens divided by all tokens in its loss; below 1 if several ranks share one loss."""
        self.loss_scale = 1.0
        """Factor of a microbatch's mean loss before backward."""
        self.counts_load = True
        self._load: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch: no types
    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        logits = self._logits(x)
        probabilities = logits.softmax(-1)
        seq = length * (self.pieces.size() if self.pieces is not None else 1)
        share: Tensor | None = None
        kept: Tensor | None = None
        if self.experts_choose:
            weights, chosen = _by_expert(probabilities, self._capacity(seq), self.pieces)
            choices, kept = chosen.flatten(1), (weights > 0).flatten(1)
            self._count(F.one_hot(choices, self.num_experts) * kept.unsqueeze(-1), None)
        else:
            weights, chosen = probabilities.topk(self.chosen, dim=-1)
            if self.chosen > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            choices = chosen.flatten(1)  # (batch, length x chosen)
            sent = F.one_hot(choices, self.num_experts)
            earlier, whole = sequence_counts(sent.sum(1), self.pieces)
            share = whole / (seq * self.chosen)
            kept = self._within_capacity(sent, earlier.gather(1, choices), seq)
            self._count(sent, kept)
        each = chosen.shape[-1]
        expert = choices.flatten() if kept is None else choices.masked_fill(~kept, self.num_experts).flatten()
        order = expert.argsort(stable=True)
        route = Route.make(expert, self.num_experts, self.group)
        order = order[: route.num_sent]
        tokens = x.reshape(-1, 1, dim).expand(-1, each, -1).flatten(0, 1)[order]
        tokens = exchange(tokens, route, self.group)
        tokens = self.experts(tokens, route.counts, self.gradient_scale)
        tokens = exchange(tokens, route.back, self.group)
        # Scatter each row to its index, so that a token's experts are summed in the same order in every layout.
        places = tokens.new_zeros(batch * length * each, dim).index_copy(0, order, tokens)
        out = (places.view(batch, length, each, dim) * weights.unsqueeze(-1).to(places.dtype)).sum(2)
        if torch.is_grad_enabled() and (self.balance_loss or self.z_loss):
            auxiliary = self._auxiliary(logits, probabilities, share)
            scaled = self.loss_scale * self.loss_share * auxiliary
            out = _WithLoss.apply(out, scaled)  # type: ignore[no-untyped-call]  # torch: no types
        return out

    def take_load(self) -> Tensor | None:
        """Return (2, experts) int64 on the device. The first row counts the choices of this rank's training tokens
        since the last call, the second row the dropped choices among these. None if there were no choices."""
        load, self._load = self._load, None
        return load

    def _logits(self, x: Tensor) -> Tensor:
        """Router logits, always in float32, because a small error can route a token differently."""
        weight: Tensor = self.router.weight
        if isinstance(weight, DTensor):  # each tensor-parallel rank has the whole router and a piece of the tokens
            weight = weight.to_local(grad_placements=(Partial(),))
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), weight.float())

    def _within_capacity(self, sent: Tensor, earlier: Tensor, seq: int) -> Tensor | None:
        """Mask of the choices within capacity, (batch, length x chosen); None if capacity is unlimited. `earlier`: for
        each choice, how often its expert was chosen in earlier pieces, same shape.
        """
        if not self.capacity_factor:
            return None
        capacity = self._capacity(seq)
        place = earlier + (sent.cumsum(1) * sent).sum(-1)  # the token's place in its expert's queue, counted from 1
        return place <= capacity

    def _capacity(self, seq: int) -> int:
        return math.ceil((self.capacity_factor or 1.0) * seq * self.chosen / self.num_experts)

    def _auxiliary(self, logits: Tensor, probabilities: Tensor, share: Tensor | None) -> Tensor:
        """Return the sum of the auxiliary losses of this rank's tokens. `share`: (batch, experts), each expert's share
        of the choices in the whole sequence; None if there is nothing to balance.
        """
        if share is None:
            return self.z_loss * logits.logsumexp(-1).square().mean()
        balance = self.num_experts * (share * probabilities.mean(1)).sum(-1).mean()
        return self.balance_loss * balance + self.z_loss * logits.logsumexp(-1).square().mean()

    def _count(self, sent: Tensor, kept: Tensor | None) -> None:
        # Count only training, but not evaluation, replay or the recomputation in backward.
        if not (self.training and self.counts_load) or graph_task_id() != -1:
            return
        tokens = sent.sum((0, 1))
        dropped = torch.zeros_like(tokens) if kept is None else (sent * ~kept.unsqueeze(-1)).sum((0, 1))
        load = torch.stack((tokens, dropped))
        self._load = load if self._load is None else self._load + load


def _by_expert(probabilities: Tensor, capacity: int, pieces: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Let each expert choose tokens of the whole sequence. Returns the weights and experts of each token, both
    (batch, length, n). A token chosen by fewer than n experts has weight zero in the remaining places."""
    whole = sequence_scores(probabilities.detach(), pieces)
    # Scores of equal tokens differ only in the last bits, which depend on the layout. These bits are dropped, so that
    # the stable sort prefers earlier tokens. Bit patterns of nonnegative floats have the same order as the floats.
    scores = (whole.view(torch.int32) + (1 << _IGNORED_BITS - 1)) >> _IGNORED_BITS
    order = scores.argsort(dim=1, descending=True, stable=True)
    taken = torch.zeros_like(whole).scatter_(1, order[:, :capacity], 1.0)
    start = (pieces.rank() if pieces is not None else 0) * probabilities.shape[1]
    masked = probabilities * taken[:, start : start + probabilities.shape[1]]
    most = max(1, int((masked > 0).sum(-1).amax()))  # the host waits for the device here, as it does in the exchange
    weights, chosen = masked.topk(most, dim=-1)
    return weights, chosen


class _WithLoss(torch.autograd.Function):
    """Identity in forward. In backward it adds the gradient of a loss, as if that loss were part of the final loss."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)


def sequence_scores(scores: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the scores of each rank's piece of each sequence, (batch, length, n), in the order of the pieces."""
    if group is None:
        return scores
    pieces = scores.new_empty(group.size(), *scores.shape)
    _all_gather(pieces.flatten(0, 1), scores.contiguous(), group=group)
    return pieces.movedim(0, 1).flatten(1, 2)


def sequence_counts(counts: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Sum the counts (batch, n) that each rank has for its pieces: over earlier pieces, and over all pieces of a
    sequence.

    earlier, whole = sequence_counts(counts, group)     # collective

    The pieces are in the order of the group's ranks; without a group the piece is the whole sequence. Each rank gathers
    the counts of all ranks, a few numbers per sequence, so that no rank waits for its predecessors in turn.
    """
    if group is None:
        return torch.zeros_like(counts), counts
    pieces = counts.new_empty(group.size(), *counts.shape)
    _all_gather(pieces.flatten(0, 1), counts.contiguous(), group=group)
    return pieces[: group.rank()].sum(0), pieces.sum(0)
