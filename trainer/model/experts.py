"""A feed-forward layer of experts: a router sends each token to the few that suit it best.

    layer = MixtureOfExperts(config.model)          # in place of FeedForward
    layer.group = ep_group                          # each of its ranks has some of the experts; None: all are here
    out = layer(x)                                  # (batch, seq, dim), as FeedForward
    layer.take_load()                               # tokens and dropped tokens of each expert since the last time

The router's probabilities are those of Shazeer et al. 2017 in float32; of more than one chosen expert they are scaled
to add up to one. Two losses keep it in order: balance (Fedus et al. 2021), experts x share of tokens x mean
probability, 1 where all experts are used alike, and the router's z-loss (Zoph et al. 2022), the squared log of its sum.
They are not added to the reported loss but enter at the layer's output in backward, in every pipeline stage.

Balance and capacity count within a sequence (as DeepSeek-V3's sequence-wise loss): what is lost, and which tokens are
dropped, then does not depend on how ranks and microbatches share the batch, and every layout trains alike. A token
over an expert's capacity goes without it; those before it in the sequence come first, so nothing looks ahead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config.model import ModelConfig
from trainer.model.exchange import Route, exchange, scaled_gradient

__all__ = ["Experts", "MixtureOfExperts"]


class Experts(nn.Module):
    """The feed-forward layers of all experts, stacked; under expert parallel a rank has some of the stack."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, dim, hidden = config.num_experts, config.dim, config.expert_ffn_dim
        self.gate = nn.Parameter(torch.empty(count, hidden, dim))
        self.up = nn.Parameter(torch.empty(count, hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))

    def forward(self, tokens: Tensor, counts: list[int], gradient_scale: float) -> Tensor:
        """`tokens` (rows, dim), of one expert after the other as `counts` says; the same shape comes out."""
        gate, up, down = (
            scaled_gradient(weight.to_local() if isinstance(weight, DTensor) else weight, gradient_scale)
            for weight in (self.gate, self.up, self.down)
        )
        parts = zip(torch.split(tokens, counts), gate.unbind(), up.unbind(), down.unbind(), strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) for x, g, u, d in parts])


class MixtureOfExperts(nn.Module):
    """Router, experts and the way between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.chosen = config.num_experts, config.experts_per_token
        self.capacity_factor = config.capacity_factor
        self.balance_loss, self.z_loss = config.balance_loss, config.router_z_loss
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.group: dist.ProcessGroup | None = None
        """Ranks that share the experts; each reads sequences of its own."""
        self.loss_scale = 1.0
        """What the mean loss of a microbatch is multiplied with before backward."""
        self.counts_load = True
        self._load: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch: no types
    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        logits = self._logits(x)
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(self.chosen, dim=-1)
        if self.chosen > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        sent = F.one_hot(chosen.flatten(1), self.num_experts)  # (batch, seq x chosen, experts)
        kept = self._within_capacity(sent, seq)
        self._count(sent, kept)
        expert = chosen.flatten() if kept is None else chosen.flatten().masked_fill(~kept.flatten(), self.num_experts)
        order = expert.argsort(stable=True)
        route = Route.make(expert, self.num_experts, self.group)
        order = order[: route.num_sent]
        tokens = x.reshape(-1, 1, dim).expand(-1, self.chosen, -1).flatten(0, 1)[order]
        tokens = exchange(tokens, route, self.group)
        tokens = self.experts(tokens, route.counts, 1.0 / (self.group.size() if self.group is not None else 1))
        tokens = exchange(tokens, route.back, self.group)
        # Each row goes to a place of its own: the sum over a token's experts has one order in every layout.
        places = tokens.new_zeros(batch * seq * self.chosen, dim).index_copy(0, order, tokens)
        out = (places.view(batch, seq, self.chosen, dim) * weights.unsqueeze(-1).to(places.dtype)).sum(2)
        if torch.is_grad_enabled() and (self.balance_loss or self.z_loss):
            scaled = self.loss_scale * self._auxiliary(logits, probabilities, sent)
            out = _WithLoss.apply(out, scaled)  # type: ignore[no-untyped-call]  # torch: no types
        return out

    def take_load(self) -> Tensor | None:
        """(2, experts) int64 on the device: choices of this rank's tokens in training since the last call, and how many
        of them were dropped. None where there were none."""
        load, self._load = self._load, None
        return load

    def _logits(self, x: Tensor) -> Tensor:
        """In float32 whatever the rest is computed in: a small error here sends a token elsewhere."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.router.weight.float())

    def _within_capacity(self, sent: Tensor, seq: int) -> Tensor | None:
        """Mask of the choices that experts take, (batch, seq x chosen); None for all."""
        if not self.capacity_factor:
            return None
        capacity = math.ceil(self.capacity_factor * seq * self.chosen / self.num_experts)
        place = (sent.cumsum(1) * sent).sum(-1)  # from 1, within the sequence
        return place <= capacity

    def _auxiliary(self, logits: Tensor, probabilities: Tensor, sent: Tensor) -> Tensor:
        share = sent.float().mean(1)  # (batch, experts)
        balance = self.num_experts * (share * probabilities.mean(1)).sum(-1).mean()
        return self.balance_loss * balance + self.z_loss * logits.logsumexp(-1).square().mean()

    def _count(self, sent: Tensor, kept: Tensor | None) -> None:
        # Backward may compute a forward pass again; an evaluation or a replay is no training.
        if not (self.training and self.counts_load) or torch._C._current_graph_task_id() != -1:
            return
        tokens = sent.sum((0, 1))
        dropped = torch.zeros_like(tokens) if kept is None else (sent * ~kept.unsqueeze(-1)).sum((0, 1))
        load = torch.stack((tokens, dropped))
        self._load = load if self._load is None else self._load + load


class _WithLoss(torch.autograd.Function):
    """Passes a tensor through and lets a loss enter in backward, as if it had been added to the loss at the end."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)
