"""Activations that forward saves for backward, in bytes a token, operation by operation.

    kept = saved_per_token(config, plan, device="cuda")
    kept.block            # bytes of a block, one token, one rank
    kept.recomputed       # of a block that recomputes: its input, and with `selective` the results of its products

The count follows Korthikanti et al. 2022 (arXiv 2205.05198, section 4: 34 h bytes a token and layer for GPT in 16
bits, without attention's square) for the layer that we have: RMSNorm, grouped queries, SwiGLU, no bias, attention that
keeps its output and one logarithm a row instead of the square; under context parallel also the mask, and the keys and
values of the whole sequence. Experts keep each row that is sent to them on its way in, in their middle, and on its way
out; that they get equally many is assumed. torch on a CPU composes RMSNorm from parts and copies
attention's result once more; a GPU does neither. A test holds the CPU's count against torch's own allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.config import Config
from trainer.layout.plan import Plan

__all__ = ["Device", "SavedActivation", "compute_bytes", "saved_per_token"]

Device = Literal["cpu", "cuda"]

FLOAT32_BYTES = 4
_LABEL_BYTES = 8  # tokens and targets are int64
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivation:
    """Bytes for one token on one rank."""

    block: float
    """Of a block that keeps everything."""
    recomputed: float
    """Of a block under activation checkpointing, as the configuration has it."""
    embedding: float
    head: float
    """Last norm, logits and loss."""
    boundary: float
    """What passes from one block, or pipeline stage, to the next."""
    loss_backward: float
    """Lives only while backward goes through the loss: the gradients of the logits."""
    block_backward: float
    """Lives only while backward goes through a block: the gradients of gate, up and product, and of the stream."""

    def of_layer(self, layer: int, config: Config) -> float:
        kind = config.train.activation_checkpointing
        keeps_all = kind == "none" or (kind == "every_n" and layer % config.train.checkpoint_every_n)
        return self.block if keeps_all else self.recomputed


def compute_bytes(config: Config) -> int:
    """Bytes of a number in the matrix products."""
    return FLOAT32_BYTES if config.train.precision == "float32" else 2


def saved_per_token(config: Config, plan: Plan, device: Device) -> SavedActivation:
    model, tp = config.model, plan.tp
    low = compute_bytes(config)
    # FSDP casts parameters, so everything is low precision; autocast leaves the residual stream float32.
    stream = low if plan.data_parallel_kind in ("fsdp", "hsdp") else FLOAT32_BYTES
    width = model.dim
    own_width = width / tp if tp > 1 and config.parallel.sequence_parallel else width
    queries = width / tp
    keys = model.kv_heads * (width // model.num_heads) / tp
    vocabulary = model.vocab_size / tp

    # Autocast keeps a cast of its own for each of the matrices that read the same activation.
    casts = low < stream
    readers_of_attention_norm = 3 if casts else 1
    norm = own_width * stream + FLOAT32_BYTES  # its input, and the root of the mean square
    if device == "cpu":
        norm += own_width * FLOAT32_BYTES  # the input divided by that root
    rows = FLOAT32_BYTES * model.num_heads / tp
    attention = low * (2 * queries + 2 * keys * plan.cp) + rows + (low * queries if device == "cpu" else 0)
    if plan.cp > 1:
        attention += low * config.data.seq_len / plan.micro_batch_size  # the mask, one for all sequences of a pass
    mlp = _experts(config, low, casts=casts) if model.num_experts else _feed_forward(config, tp, low, casts=casts)
    boundary = own_width * stream
    recomputed = boundary
    if config.train.activation_checkpointing == "selective":
        products = 2 * queries + 2 * keys + width + mlp.products
        recomputed += low * products + rows + (2 * low * own_width if tp > 1 else 0)
    logits = FLOAT32_BYTES * vocabulary  # the logarithms of the softmax
    return SavedActivation(
        block=2 * norm + readers_of_attention_norm * width * low + attention + mlp.kept + _dropout(config, own_width),
        recomputed=recomputed,
        embedding=_LABEL_BYTES,
        head=norm + width * low + logits + _LABEL_BYTES,
        boundary=boundary,
        loss_backward=2 * FLOAT32_BYTES * vocabulary,
        block_backward=mlp.backward + 2 * boundary,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Middle:
    """The feed-forward part of a block: for one token, `kept` and `backward` in bytes, `products` in numbers."""

    kept: float
    products: float
    backward: float


def _feed_forward(config: Config, tp: int, low: int, *, casts: bool) -> _Middle:
    width, hidden = config.model.dim, config.model.ffn_dim / tp
    return _Middle(
        kept=(2 if casts else 1) * width * low + 4 * low * hidden,  # gate, its silu, up, their product
        products=width + 2 * hidden,
        backward=3 * low * hidden,
    )


def _experts(config: Config, low: int, *, casts: bool) -> _Middle:
    """A token is sent to some of the experts, one row each; with a capacity below 1 not all of them arrive."""
    model = config.model
    sent = model.experts_per_token
    arriving = sent * min(1.0, model.capacity_factor or 1.0)
    width, hidden = arriving * model.dim, arriving * model.expert_ffn_dim
    router = FLOAT32_BYTES * (model.dim + 2 * model.num_experts + 3 * sent) + _INDEX_BYTES * 2 * sent
    places = sent * model.dim
    return _Middle(
        # What experts read, four numbers of their middle, what they give, and the same at the token's place.
        kept=router + (2 if casts else 1) * low * width + 4 * low * hidden + low * width + low * places,
        products=width + 2 * hidden,
        backward=3 * low * hidden + 2 * low * width,
    )


def _dropout(config: Config, own_width: float) -> float:
    """Two masks of a byte."""
    return 2 * own_width if config.model.dropout else 0.0
