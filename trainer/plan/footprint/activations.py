"""Activations that forward saves for backward, in bytes per token, operation by operation.

    kept = saved_per_token(config, plan, device="cuda")
    kept.block            # bytes of a block, one token, one rank
    kept.recomputed       # bytes of a recomputed block: its input, with `selective` also the results of its matmuls

The count follows Korthikanti et al. 2022 (arXiv 2205.05198, section 4: 34 h bytes per token and layer for GPT in 16
bits, without attention's square). This trainer's layer has RMSNorm, grouped queries, SwiGLU and no bias. Its attention
keeps the output and the log-sum-exp of each row instead of the square. Under context parallelism, except in a ring,
attention also keeps the mask, and the keys and values of the whole sequence. A chunked loss keeps the hidden states,
their gradient, and for a moment the logits of a chunk. Experts keep inputs, hidden activations and outputs for each row
that they receive. All experts are assumed to receive the same number of rows. Each tensor-parallel rank sends the rows
of its part of the tokens. On a CPU, torch composes RMSNorm from several operations and copies the result of attention
once more; on a GPU it does neither. A test compares the count for a CPU with torch's allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.config import Config
from trainer.layout.loss_chunks import is_chunked, tokens_at_once
from trainer.layout.plan import Plan

__all__ = ["Device", "SavedActivation", "compute_bytes", "is_recomputed", "reduced_bytes", "saved_per_token"]

Device = Literal["cpu", "cuda"]

FLOAT32_BYTES = 4
_LABEL_BYTES = 8  # tokens and targets are int64
_INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivation:
    """Bytes for one token on one rank."""

    block: float
    """Bytes kept by a block without recomputation."""
    recomputed: float
    """Bytes kept by a block under the configured activation checkpointing."""
    embedding: float
    head: float
    """Bytes kept by the last norm, the logits and the loss."""
    boundary: float
    """Bytes passed from one block, or pipeline stage, to the next."""
    loss_backward: float
    """Bytes that exist only during backward of the loss: the gradients of the logits."""
    block_backward: float
    """Bytes that exist only during backward of a block: the gradients of gate, up and their product, and of the
    residual stream."""
    after_gather: float
    """Bytes of a recomputed block that are not allocated yet when its experts are gathered."""
    experts: float
    """Bytes that the experts of a block keep; they are freed after the experts' backward."""
    rows_gradient: float
    """Bytes that exist only during backward of the experts: the gradients of the rows and of the residual stream."""

    def of_layer(self, layer: int, config: Config) -> float:
        return self.recomputed if is_recomputed(layer, config) else self.block


def is_recomputed(layer: int, config: Config) -> bool:
    """Return True for a block that backward computes again, at least in part."""
    kind = config.train.activation_checkpointing
    return kind != "none" and not (kind == "every_n" and layer % config.train.checkpoint_every_n)


def compute_bytes(config: Config) -> int:
    """Bytes per number in matrix products."""
    return FLOAT32_BYTES if config.train.precision == "float32" else 2


def reduced_bytes(config: Config) -> int:
    """Bytes per number in FSDP's gradient reductions."""
    return 2 if config.parallel.reduce_dtype == "bf16" else FLOAT32_BYTES


def saved_per_token(config: Config, plan: Plan, device: Device) -> SavedActivation:
    """Bytes that forward saves on one rank, for one token."""
    model, tp = config.model, plan.tp
    low = compute_bytes(config)  # bytes of a number in the compute dtype
    # the residual stream has the compute dtype: FSDP casts parameters, and autocast needs a cast of the embedding
    stream, is_ring = low, config.parallel.cp_exchange == "ring"
    width = model.dim
    own_width = width / tp if tp > 1 and config.parallel.sequence_parallel else width
    queries = width / tp
    keys = model.kv_heads * (width // model.num_heads) / tp
    vocabulary = model.vocab_size / tp

    # A normalization layer keeps its input and the root of the mean square. On a CPU it keeps the input in float32, and
    # also the input divided by the root.
    norm = own_width * (2 * FLOAT32_BYTES if device == "cpu" else stream) + FLOAT32_BYTES
    rows = FLOAT32_BYTES * model.num_heads / tp
    attention = low * (2 * queries + 2 * keys * (1 if is_ring else plan.cp)) + rows
    attention += low * queries if device == "cpu" else 0
    # FSDP also casts the other inputs of a block: cosine and sine for all positions.
    if low < FLOAT32_BYTES and plan.data_parallel_kind in ("fsdp", "hsdp"):
        positions = config.data.seq_len // plan.cp if plan.cp > 1 else model.max_seq_len
        angles = low * positions * (width // model.num_heads) / (plan.micro_batch_size * config.data.seq_len // plan.cp)
    else:
        angles = 0.0
    if plan.cp > 1 and not is_ring:
        attention += low * config.data.seq_len / plan.micro_batch_size  # the mask, shared by all sequences of a pass
    mlp = (_experts if model.num_experts else _feed_forward)(config, tp, low)
    boundary = own_width * stream
    recomputed, after_gather = boundary + angles, mlp.experts - mlp.expert_inputs
    if config.train.activation_checkpointing == "selective":
        products = 2 * queries + 2 * keys + width + mlp.products
        reductions = 0 if tp == 1 else 1 if model.num_experts else 2
        recomputed += low * products + rows + reductions * low * own_width
        after_gather -= low * mlp.products
    logits: float
    loss_backward: float
    if is_chunked(config.train, plan, device):
        chunk = min(1.0, tokens_at_once(round(vocabulary)) / (plan.micro_batch_size * config.data.seq_len // plan.cp))
        logits, loss_backward = width * low, 2 * low * vocabulary * chunk
    else:
        # The log-softmax is kept; backward needs two more tensors of its size.
        logits, loss_backward = FLOAT32_BYTES * vocabulary, 2 * FLOAT32_BYTES * vocabulary
    return SavedActivation(
        block=angles + 2 * norm + width * low + attention + mlp.kept + _dropout(config, own_width),
        recomputed=recomputed,
        embedding=_LABEL_BYTES,
        head=norm + width * low + logits + _LABEL_BYTES,
        boundary=boundary,
        loss_backward=loss_backward,
        block_backward=mlp.backward + 2 * boundary,
        after_gather=after_gather,
        experts=mlp.experts,
        rows_gradient=mlp.rows_gradient + boundary,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _FeedForwardSaved:
    """The feed-forward part of a block, per token. `kept` and `backward` are bytes. `products`: number of elements in
    the results of the matmuls."""

    kept: float
    products: float
    backward: float
    experts: float = 0.0
    """Part of `kept` for inputs, internals and outputs of experts."""
    expert_inputs: float = 0.0
    """Part of `experts` for their inputs."""
    rows_gradient: float = 0.0


def _feed_forward(config: Config, tp: int, low: int) -> _FeedForwardSaved:
    width, hidden = config.model.dim, config.model.ffn_dim / tp
    return _FeedForwardSaved(
        kept=width * low + 4 * low * hidden,  # the input, and four hidden tensors: gate, silu(gate), up, their product
        products=width + 2 * hidden,
        # The gradients of three of these four tensors, minus the product of forward, which is freed by then.
        backward=2 * low * hidden,
    )


def _experts(config: Config, tp: int, low: int) -> _FeedForwardSaved:
    """Bytes of experts. A token is sent to several experts, as one row to each. With a capacity factor below 1, some
    rows are dropped."""
    model = config.model
    sent = model.experts_per_token / tp
    arriving = sent * min(1.0, model.capacity_factor or 1.0)
    width, hidden = arriving * model.dim, arriving * model.expert_ffn_dim
    router = FLOAT32_BYTES * ((model.dim + 2 * model.num_experts) / tp + 3 * sent) + _INDEX_BYTES * 2 * sent
    expert_inputs = low * width
    # Inputs of the experts, four hidden activations, their outputs, and the outputs in token order.
    experts = expert_inputs + 4 * low * hidden + low * width + low * sent * model.dim
    return _FeedForwardSaved(
        kept=router + experts,
        products=width + 2 * hidden,
        # The gradients of the outputs and of three hidden tensors, minus the product of forward, which is freed by
        # then.
        backward=2 * low * hidden + low * width,
        experts=experts,
        expert_inputs=expert_inputs,
        rows_gradient=low * width,
    )


def _dropout(config: Config, own_width: float) -> float:
    """Bytes of the two dropout masks, one byte per number."""
    return 2 * own_width if config.model.dropout else 0.0
