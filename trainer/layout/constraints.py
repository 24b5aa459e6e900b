"""Constraints between settings, checked before any process group is made; one line each.

    for check in CHECKS:
        check(config, plan)        # raises ConfigError: the key, its value, what is in the way, what to do

Here is what depends on the whole layout; the limits of one value are in its section of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.config.config import Config
from trainer.config.load import ConfigError

if TYPE_CHECKING:
    from trainer.layout.plan import Plan

__all__ = ["CHECKS"]

TENSORS_PER_BLOCK = 9
"""Two norms, four matrices of attention, three of the feed-forward layer."""


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
    if kind == "powersgd" and plan.pp > 1:
        raise ConfigError(f"{setting}: needs parallel.pp = 1, not {plan.pp}; allowed in a pipeline: fp16, bf16")
    if kind == "powersgd" and config.train.precision == "fp16":
        raise ConfigError(
            f"{setting}: not with train.precision = 'fp16', whose overflows would stay in what PowerSGD keeps; use bf16"
        )


def _compile(config: Config, plan: Plan) -> None:
    if not config.train.compile:
        return
    if config.train.activation_checkpointing == "selective":
        raise ConfigError(
            "train.compile = true: hides the operations that activation_checkpointing = 'selective' chooses from; "
            "allowed: none, full, every_n"
        )
    if plan.tp > 1:
        raise ConfigError(
            f"train.compile = true: needs parallel.tp = 1, not {plan.tp} (torch 2.13 loses DTensor's gradients at the "
            "border of what is compiled)"
        )
    if plan.pp > 1 and plan.schedule.endswith("zero_bubble"):
        raise ConfigError(
            f"train.compile = true: compiled backward passes cannot be taken in two parts, as {plan.schedule} does; "
            "allowed: gpipe, 1f1b, interleaved_1f1b"
        )


def _context(config: Config, plan: Plan) -> None:
    cp = plan.cp
    if cp == 1:
        return
    pieces = cp * (plan.tp if config.parallel.sequence_parallel else 1)
    if config.data.seq_len % pieces:
        of = f"parallel.cp = {cp}" if pieces == cp else f"parallel.cp x tp = {pieces}"
        raise ConfigError(f"data.seq_len = {config.data.seq_len}: must be divisible by {of}")
    if config.data.document_mask:
        raise ConfigError(f"data.document_mask = true: needs parallel.cp = 1, not {cp} (a piece does not see all ends)")
    if config.model.num_experts:
        raise ConfigError(
            f"model.num_experts = {config.model.num_experts}: needs parallel.cp = 1, not {cp} "
            "(balance and capacity count within a whole sequence)"
        )


def _experts(config: Config, plan: Plan) -> None:
    model, ep = config.model, plan.ep
    if ep > 1 and not model.num_experts:
        raise ConfigError(f"parallel.ep = {ep}: needs experts to share; set model.num_experts")
    if not model.num_experts:
        return
    if model.num_experts % ep:
        raise ConfigError(f"model.num_experts = {model.num_experts}: must be divisible by parallel.ep = {ep}")
    setting = f"model.num_experts = {model.num_experts}"
    if plan.tp > 1:
        raise ConfigError(f"{setting}: experts are not split by parallel.tp = {plan.tp}; use ep and dp_shard")
    if plan.pp > 1 and plan.schedule.endswith("zero_bubble"):
        raise ConfigError(
            f"{setting}: the way to experts and back cannot be taken in two parts, as {plan.schedule} does; "
            "allowed: gpipe, 1f1b, interleaved_1f1b"
        )
    if ep > 1:
        for key, width in (("model.dim", model.dim), ("the experts' width", model.expert_ffn_dim)):
            if width % plan.dp_shard:
                raise ConfigError(f"{key} = {width}: must be divisible by parallel.dp_shard = {plan.dp_shard}")


def _cpu_offload(config: Config, plan: Plan) -> None:
    if config.parallel.cpu_offload and plan.data_parallel_kind not in ("fsdp", "hsdp"):
        raise ConfigError(
            f"parallel.cpu_offload = true: needs FSDP (dp_shard above 1), here dp_shard is {plan.dp_shard}"
        )


def _reduction(config: Config, plan: Plan) -> None:
    parallel = config.parallel
    chosen = {
        "reduce_every_microbatch = true": parallel.reduce_every_microbatch,
        "reduce_dtype = 'bf16'": parallel.reduce_dtype != "float32",
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
    if not plan.zero1:
        return
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


CHECKS: tuple[Callable[[Config, Plan], None], ...] = (
    _zero1, _compression, _compile, _context, _experts, _cpu_offload, _reduction,
)  # fmt: skip
"""In the order in which they are checked."""
