"""Constraints between settings, checked before any process group is created. Each error is one line.

    for check in CHECKS:
        check(config, plan)        # raises ConfigError: the key, its value, the obstacle, what to do

These constraints depend on the whole layout. Limits of single values are in the configuration's sections.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.layout.plan import Plan

__all__ = ["CHECKS"]

CODES_BLOCK = 128
"""Number of adjacent elements of a row that share a scale, as in `trainer.training.adamw8bit`."""
FLOAT8_MULTIPLE = 16
"""Rows and columns of fp8 matrix products must be multiples of this, as in `trainer.model.float8`."""
TENSORS_PER_BLOCK = 9
"""Parameters of a block: two norms, four matrices of attention, three matrices of the feed-forward layer."""


def _compression(config: Config, plan: Plan) -> None:
    kind = config.parallel.gradient_compression
    if kind == "none" or plan.data_parallel_kind == "none":
        return
    setting = f"parallel.gradient_compression = {kind!r}"
    if plan.data_parallel_kind != "ddp":
        raise ConfigError(
            f"{setting}: needs DDP, whose hooks compress; here it is {plan.data_parallel_kind} "
            "(FSDP reduces in float32)"
        )
    if kind not in ("fp16", "bf16") and plan.pp > 1:
        raise ConfigError(f"{setting}: needs parallel.pp = 1, not {plan.pp}; allowed in a pipeline: fp16, bf16")
    if kind not in ("fp16", "bf16") and config.train.precision == "fp16":
        raise ConfigError(
            f"{setting}: not with train.precision = 'fp16', whose overflows would persist in the error feedback; use "
            "bf16"
        )


def _loss_in_chunks(config: Config, plan: Plan) -> None:
    if config.train.chunked_loss is True and plan.pp > 1:
        raise ConfigError(
            f"train.chunked_loss = true: needs parallel.pp = 1, not {plan.pp} (a pipeline's schedule takes whole "
            "logits); allowed: auto, false"
        )


def _separator(config: Config, plan: Plan) -> None:
    if config.data.document_mask and config.data.separator >= config.model.vocab_size:
        raise ConfigError(
            f"data.separator = {config.data.separator}: must be a token id, below model.vocab_size = "
            f"{config.model.vocab_size}"
        )


def _compile(config: Config, plan: Plan) -> None:
    if config.train.compile is True and not plan.compiles:
        raise ConfigError(
            "train.compile = true: compiled backward passes cannot be split into input and weight gradients, which "
            f"{plan.schedule} needs; "
            "allowed: gpipe, 1f1b, interleaved_1f1b"
        )


def _async_tp(config: Config, plan: Plan) -> None:
    if not config.parallel.async_tp:
        return
    needed = {
        "parallel.tp above 1": plan.tp > 1,
        "parallel.sequence_parallel = true": config.parallel.sequence_parallel,
        "train.compile (the compiler splits the matmuls)": config.train.compile is not False and plan.compiles,
        "train.compile_backend = 'inductor'": config.train.compile_backend == "inductor",
        "train.backend = 'nccl' or 'auto'": config.train.backend != "gloo",
    }
    if lacking := next((name for name, is_there in needed.items() if not is_there), ""):
        raise ConfigError(f"parallel.async_tp = true: needs {lacking}")


def _context(config: Config, plan: Plan) -> None:
    cp = plan.cp
    if cp == 1:
        return
    ring = config.parallel.cp_exchange == "ring"
    if ring and config.model.capacity_factor:
        raise ConfigError(
            f"parallel.cp_exchange = 'ring': not with model.capacity_factor = {config.model.capacity_factor} (earlier "
            "tokens come first, and a rank has an early and a late chunk of a sequence); allowed: gather"
        )
    if ring and config.model.num_experts and config.model.expert_routing == "expert":
        raise ConfigError(
            "parallel.cp_exchange = 'ring': not with model.expert_routing = 'expert' (equal tokens are "
            "taken in their order, and a rank has an early and a late chunk); allowed: gather"
        )
    pieces = cp * (2 if ring else 1) * (plan.tp if config.parallel.sequence_parallel or config.model.num_experts else 1)
    if config.data.seq_len % pieces:
        divisor = f"parallel.cp = {cp}" if pieces == cp else f"parallel.cp x tp = {pieces}"
        divisor = f"{pieces}, the chunks of a ring" if ring else divisor
        raise ConfigError(f"data.seq_len = {config.data.seq_len}: must be divisible by {divisor}")
    if config.data.document_mask:
        raise ConfigError(
            f"data.document_mask = true: needs parallel.cp = 1, not {cp} (a rank's chunk lacks the "
            "other chunks' separators)"
        )


def _experts(config: Config, plan: Plan) -> None:
    model, ep = config.model, plan.ep
    if ep > 1 and not model.num_experts:
        raise ConfigError(f"parallel.ep = {ep}: needs experts to share; set model.num_experts")
    if not model.num_experts:
        return
    if model.num_experts % (ep * plan.tp):
        holders = _product(plan, "ep", "tp")
        raise ConfigError(f"model.num_experts = {model.num_experts}: must be divisible by {holders}")
    setting = f"model.num_experts = {model.num_experts}"
    if model.expert_products == "grouped":
        step = 4 if config.train.precision == "float32" else 8
        for key, width in (("model.dim", model.dim), ("the experts' width", model.expert_ffn_dim)):
            if width % step:
                raise ConfigError(
                    f"{key} = {width}: model.expert_products = 'grouped' needs rows of a multiple of 16 bytes, "
                    f"so a multiple of {step}"
                )
    if plan.pp > 1 and plan.schedule.endswith("zero_bubble"):
        raise ConfigError(
            f"{setting}: the backward of the token exchange cannot be split into input and weight gradients, which "
            f"{plan.schedule} needs; "
            "allowed: gpipe, 1f1b, interleaved_1f1b"
        )
    if ep * plan.tp > 1:
        for key, width in (("model.dim", model.dim), ("the experts' width", model.expert_ffn_dim)):
            if width % (plan.dp_shard * plan.cp):
                raise ConfigError(f"{key} = {width}: must be divisible by {_product(plan, 'dp_shard', 'cp')}")


def _product(plan: Plan, *dims: str) -> str:
    """Text with the product of mesh sizes above 1, such as `parallel.ep = 2` or `parallel.ep x tp = 4`."""
    used = [dim for dim in dims if plan.sizes[dim] > 1]
    return f"parallel.{' x '.join(used)} = {math.prod(plan.sizes[dim] for dim in used)}"


def _reduction(config: Config, plan: Plan) -> None:
    parallel = config.parallel
    chosen = {
        "reduce_every_microbatch = true": parallel.reduce_every_microbatch,
        "reduce_dtype = 'bf16'": parallel.reduce_dtype != "float32",
        "float8_all_gather = true": parallel.float8_all_gather,
    }
    for setting in (name for name, is_chosen in chosen.items() if is_chosen):
        if plan.data_parallel_kind not in ("fsdp", "hsdp"):
            raise ConfigError(f"parallel.{setting}: needs FSDP (dp_shard above 1), here dp_shard is {plan.dp_shard}")
    if parallel.reduce_every_microbatch and plan.pp > 1:
        raise ConfigError(
            f"parallel.reduce_every_microbatch = true: needs parallel.pp = 1, not {plan.pp} (a pipeline's schedule "
            "reduces with its last microbatch)"
        )


def _zero1(config: Config, plan: Plan) -> None:
    if not config.parallel.zero1 or plan.data_parallel_kind == "none":
        return
    if config.parallel.cpu_offload == "optimizer":
        raise ConfigError(
            "parallel.zero1 = true: not with parallel.cpu_offload = 'optimizer', which uses a "
            "different AdamW; choose one"
        )
    if plan.data_parallel_kind != "ddp":
        why = {
            "fsdp": "FSDP shards the optimizer's state already",
            "hsdp": "these replicas go through FSDP2, which shards with dp_shard",
        }[plan.data_parallel_kind]
        raise ConfigError(f"parallel.zero1 = true: needs DDP, here it is {plan.data_parallel_kind} ({why})")
    fewest = min(len([n for stage in stages for n in plan.stages.layers[stage]]) for stages in plan.stages.of_rank)
    if plan.dp_replicate > TENSORS_PER_BLOCK * fewest:
        raise ConfigError(
            f"parallel.zero1 = true: {plan.dp_replicate} replicas share whole tensors, and a rank's {fewest} layers "
            f"have {TENSORS_PER_BLOCK * fewest}; use dp_shard"
        )


def _optimizer_name(config: Config, plan: Plan) -> None:
    if config.optim.name == "adamw":
        return
    setting = f"optim.name = {config.optim.name!r}"
    if plan.zero1:
        raise ConfigError(
            f"{setting}: not with parallel.zero1 = true, which distributes parameters over the ranks' AdamW; use "
            "dp_shard"
        )
    if config.parallel.cpu_offload != "none":
        raise ConfigError(
            f"{setting}: not with parallel.cpu_offload = {config.parallel.cpu_offload!r} (its update would run on "
            "the host)"
        )
    if config.model.num_experts:
        raise ConfigError(
            f"{setting}: not with model.num_experts = {config.model.num_experts}, whose matrices are stacked in one "
            "tensor; use adamw"
        )


def _float8(config: Config, plan: Plan) -> None:
    kind = config.train.float8
    if kind == "none":
        if config.train.float8_emulated:
            raise ConfigError("train.float8_emulated = true: needs train.float8 = 'tensorwise' or 'rowwise'")
        return
    setting = f"train.float8 = {kind!r}"
    if config.train.precision == "fp16":
        raise ConfigError(
            f"{setting}: not with train.precision = 'fp16', whose loss scale it does not need; allowed: bf16, float32"
        )
    if plan.pp > 1 and plan.schedule.endswith("zero_bubble"):
        raise ConfigError(
            f"{setting}: its backward cannot be split into input and weight gradients, which {plan.schedule} needs; "
            "allowed: gpipe, 1f1b, interleaved_1f1b"
        )
    if config.model.dim % (FLOAT8_MULTIPLE * plan.tp):
        raise ConfigError(
            f"{setting}: no layer is divisible into rows and columns of a multiple of {FLOAT8_MULTIPLE} on each of "
            f"{plan.tp} tensor-parallel ranks; model.dim = {config.model.dim} must be a multiple of "
            f"{FLOAT8_MULTIPLE * plan.tp}"
        )
    tokens = plan.micro_batch_size * config.data.seq_len // plan.cp
    if tokens % FLOAT8_MULTIPLE:
        raise ConfigError(
            f"{setting}: a pass has {tokens} tokens on a rank (train.micro_batch_size x data.seq_len / parallel.cp); "
            f"must be a multiple of {FLOAT8_MULTIPLE}"
        )


def _float8_gather(config: Config, plan: Plan) -> None:
    if not config.parallel.float8_all_gather:
        return
    setting = "parallel.float8_all_gather = true"
    if config.train.float8 != "tensorwise":
        why = "" if config.train.float8 == "none" else ", which rounds a matrix by rows and again by columns"
        raise ConfigError(f"{setting}: needs train.float8 = 'tensorwise', not {config.train.float8!r}{why}")
    if plan.offloads_parameters:
        raise ConfigError(f"{setting}: not with parallel.cpu_offload = 'all' (shards would be rounded on the host)")
    model, shards = config.model, plan.dp_shard * plan.ep * plan.cp
    # (rows, ranks that share them). tp splits attention's output and the feed-forward's `down` by columns, the other
    # matrices by rows.
    matrices = [(model.dim, shards), (model.dim // model.num_heads * model.kv_heads, shards * plan.tp)]
    matrices += [] if model.num_experts else [(model.ffn_dim, shards * plan.tp)]
    if all(rows % ranks or rows % (FLOAT8_MULTIPLE * plan.tp) for rows, ranks in matrices):
        raise ConfigError(f"{setting}: no matrix has rows for {shards} equal shards; change parallel.dp_shard")


def _whole_blocks(config: Config, plan: Plan) -> None:
    """8-bit moments have one scale per block of adjacent elements of a row. Tensor parallelism must not split a
    block."""
    if config.optim.name != "adamw8bit":
        return
    for key, width in (("model.dim", config.model.dim), ("the feed-forward's width", config.model.ffn_dim)):
        if width % CODES_BLOCK == 0 and width // plan.tp % CODES_BLOCK:
            raise ConfigError(
                f"optim.name = 'adamw8bit': parallel.tp = {plan.tp} splits {key} = {width} into pieces of "
                f"{width // plan.tp}; must be multiples of {CODES_BLOCK}"
            )


CHECKS: tuple[Callable[[Config, Plan], None], ...] = (
    _zero1, _compression, _separator, _loss_in_chunks, _compile, _async_tp, _context, _experts, _reduction,
    _optimizer_name, _float8, _float8_gather, _whole_blocks,
)  # fmt: skip
"""All constraints, in the order of checking."""
