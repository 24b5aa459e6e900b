"""A decoder-only transformer like Llama: RMSNorm, rotary embeddings, SwiGLU, grouped-query attention.

    model = Transformer(config.model)
    logits = model(tokens)                      # (batch, seq) int64 -> (batch, seq, vocab)
    loss = model(tokens, targets)               # mean cross-entropy in nats per token, computed in chunks

A pipeline stage is the same class with only some of the blocks. Blocks keep their number in the whole model, so a
parameter has the same name (`blocks.3.mlp.up.weight`) in every parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.checkpoint import checkpoint

from trainer.config.config import ModelConfig
from trainer.layout.loss_chunks import tokens_at_once
from trainer.model.chunked_loss import Softmax, chunked_loss
from trainer.model.experts import MixtureOfExperts

__all__ = ["Block", "Transformer", "document_attention", "document_numbers"]

DOCUMENT_ROWS = 512
"""Number of queries in a block of `document_attention`."""


def rotary_angles(head_dim: int, seq_len: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each (seq_len, head_dim / 2), float32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head's vector by the angle of its position. x: (batch, heads, seq, head_dim)."""
    cos, sin = cos[: x.shape[-2]].to(x.dtype), sin[: x.shape[-2]].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Norm(nn.RMSNorm):
    """RMSNorm in its input's dtype, for which torch has a fused kernel; the parameter may have a wider dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.grouped = config.kv_heads != config.num_heads
        self.query = nn.Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)
        self.gather: Callable[[Tensor], Tensor] | None = None
        """Context parallelism: maps the keys and values of this rank's shard to the keys and values of the whole
        sequence."""
        self.ring: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Context parallelism: maps query, key and value of this rank's shard to attention over the whole sequence."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """`mask`: None for causal attention, a mask (1, 1, queries, keys), or the number of each token's document,
        (batch, seq)."""
        batch, seq, _ = x.shape
        # -1: under tensor parallelism a rank has only some of the heads.
        query, key, value = (
            part.view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.ring is not None:
            return self._output(self.ring(query, key, value))
        if mask is not None and mask.dim() == 2:
            return self._output(document_attention(query, key, value, mask))
        if self.gather is not None:
            key, value = self.gather(torch.stack((key, value))).unbind()
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        return self._output(mixed)

    def _output(self, mixed: Tensor) -> Tensor:
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """One layer. If `recompute` is set, it runs the layer under activation checkpointing.

    Checkpointing is in `forward` and not in a wrapper module, so that parameter names do not change, and FSDP's hooks
    on the module do not run again in the recomputation.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.dim, eps=config.norm_eps)
        self.mlp = MixtureOfExperts(config) if config.num_experts else FeedForward(config)
        self.dropout = config.dropout
        self.recompute: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None = None
        self.compiled: Callable[..., Tensor] | None = None
        """`layer` through torch.compile."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        layer = self.compiled or self.layer
        if self.recompute is None or not torch.is_grad_enabled():
            return layer(x, cos, sin, mask)
        out: Tensor = checkpoint(layer, x, cos, sin, mask, use_reentrant=False, context_fn=self.recompute)
        return out

    def layer(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + F.dropout(self.attention(self.attention_norm(x), cos, sin, mask), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class Transformer(nn.Module):
    """The whole model, or the pipeline stage with `layers` (`first` has the embedding, `last` the head).

    Input of the first stage: tokens (batch, seq), int64; of the others: hidden states (batch, seq, dim).
    Output of the last stage: logits (batch, seq, vocab); of the others: hidden states.
    With `separator` a token attends only to its own document. The model must then not be split into stages.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[int] | None = None,
        *,
        first: bool = True,
        last: bool = True,
        separator: int | None = None,
    ) -> None:
        super().__init__()
        self.separator = separator
        self.compiled = False
        """True if the blocks go through torch.compile."""
        self.chunks: tuple[int, ...] = (0,)
        self.num_chunks = 1
        """Context parallelism: each sequence is cut into `num_chunks` chunks, of which this rank gets `chunks`."""
        self.is_ring = False
        """Context parallelism: True for ring attention, False if keys and values are gathered."""
        self.output_loss = OutputLoss()
        self.embed = nn.Embedding(config.vocab_size, config.dim) if first else None
        numbers = range(config.num_layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(number): Block(config) for number in numbers})
        self.norm = Norm(config.dim, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if last else None
        self.tied = config.tie_embeddings and first and last
        self.tie()
        self._rotary = (config.dim // config.num_heads, config.max_seq_len, config.rope_theta)
        cos, sin = rotary_angles(*self._rotary)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def tie(self) -> None:
        """Tie head and embedding again after their parameters were replaced."""
        if self.tied and self.head is not None and self.embed is not None:
            self.head.weight = self.embed.weight

    def fill_buffers(self) -> None:
        """Compute the rotary angles again, after `to_empty`."""
        cos, sin = rotary_angles(*self._rotary)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Shapes: see the class. With `targets`, the last stage returns the mean loss instead of the logits."""
        mask = document_numbers(x, self.separator) if self.separator is not None else None
        cos, sin = self.cos, self.sin
        if self.num_chunks > 1:
            cos, sin, mask = self._chunk_angles(x.shape[1])
        if self.embed is not None:
            x = self.embed(x)
            if torch.is_autocast_enabled(x.device.type):  # the same dtype as under FSDP, which casts the embedding
                x = x.to(torch.get_autocast_dtype(x.device.type))
            if self.compiled:
                # Under tensor parallelism `x` may be an AsyncCollectiveTensor, whose reduction is still running. For
                # this class torch 2.13's compiled blocks return a gradient without DTensor's placements.
                x = x.clone()
        for block in self.blocks.values():
            x = block(x, cos, sin, mask)
        if self.norm is None or self.head is None:
            return x
        x = self.norm(x)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        return self.output_loss.compute(x, self.head.weight, targets)

    def _chunk_angles(self, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotary angles of this rank's chunks (`length` positions in total), and the chunks' attention mask over the
        whole sequence, (1, 1, length, seq). The mask is None for ring attention, because this has its own masking."""
        size = length // len(self.chunks)
        parts = [slice(chunk * size, (chunk + 1) * size) for chunk in self.chunks]
        cos, sin = (torch.cat([angles[part] for part in parts]) for angles in (self.cos, self.sin))
        if self.is_ring:
            return cos, sin, None
        seen = torch.ones(length, size * self.num_chunks, dtype=torch.bool, device=self.cos.device)
        return cos, sin, seen.tril(self.chunks[0] * size)[None, None]


@dataclass(slots=True)
class OutputLoss:
    """Computes the loss of one model part.

    The weight is a plain tensor (also if FSDP has gathered it), or a DTensor split by vocabulary over the
    tensor-parallel ranks. Each of these ranks needs all hidden states. Under sequence parallelism it gathers them, and
    backward sums their gradients.
    """

    softmax: Softmax = field(default_factory=Softmax.eager)
    reader: Callable[[Tensor], None] | None = None
    """Function that receives the loss of each token, (batch, seq); None normally."""

    def compute(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `hidden`, (batch, seq, dim), in nats per token, float32."""
        vocab_size, group = weight.shape[0], None
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            group = mesh.get_group()
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        loss, token_losses = chunked_loss(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            chunk=tokens_at_once(vocab_size),
            group=group,
            softmax=self.softmax,
        )
        if self.reader is not None:
            self.reader(token_losses.view_as(targets))
        return loss


def document_numbers(tokens: Tensor, separator: int) -> Tensor:
    """Number of each token's document within its sequence. A separator belongs to the document that it ends."""
    ends = tokens == separator
    return ends.cumsum(dim=1, dtype=torch.int32) - ends.int()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch: no types
def document_attention(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor) -> Tensor:
    """Attention within documents. All tensors are (batch, heads, seq, head_dim); `key` and `value` may have fewer heads
    than `query` (grouped-query attention).

    Queries are processed in blocks. Each block attends, under a separate mask, to the keys up to its last position. If
    there is more than one block, backward recomputes them. So the mask of only one block exists at a time.
    """
    seq = query.shape[2]
    if seq <= DOCUMENT_ROWS:
        return _rows(query, key, value, numbers, numbers, 0)
    parts = []
    for start in range(0, seq, DOCUMENT_ROWS):
        stop = min(start + DOCUMENT_ROWS, seq)
        tensors = (query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop])
        masking = (numbers[:, start:stop], numbers[:, :stop], start)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_rows, *tensors, *masking, use_reentrant=False))
        else:
            parts.append(_rows(*tensors, *masking))
    return torch.cat(parts, dim=2)


def _rows(query: Tensor, key: Tensor, value: Tensor, own: Tensor, others: Tensor, start: int) -> Tensor:
    same = own.unsqueeze(2) == others.unsqueeze(1)
    earlier = torch.ones_like(same[0]).tril(start)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=(same & earlier).unsqueeze(1), enable_gqa=query.shape[1] != key.shape[1]
    )
