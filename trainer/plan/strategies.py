"""Candidate layouts for a number of devices, the simplest first, and the first one that fits.

    found = strategies(config, hardware, num_gpus=64)
    found.simplest          # Strategy, or None: nothing fits
    found.tried             # all of them, in the order of their complexity

Simple before fast: the candidates are DDP, ZeRO-1, ZeRO-2, FSDP, HSDP, recomputation, expert parallelism, tensor
parallelism within a node, context parallelism for long sequences, pipelines (also with tensor parallelism), and finally
state in the host's memory. Each of them costs communication, bubbles or host time, and is chosen only if the previous
ones do not fit. The configuration's own layout comes last. The fastest fitting layout is also reported. It may be the
same layout with fp8 matmuls; its `name` then says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config.config import Config
from trainer.config.load import ConfigError, changed_config
from trainer.layout.resolve import resolve
from trainer.plan.expected import Expected, expect
from trainer.plan.hardware import Hardware
from trainer.plan.what_would_fit import what_would_fit

__all__ = ["Strategies", "Strategy", "strategies"]

_LONG_SEQUENCE = 16_384
"""Minimum sequence length in tokens for trying context parallelism."""
_EXPERT_SIZES = (2, 4, 8, 16, 32, 64)
"""Sizes of expert parallelism that are tried; they may span nodes, as in DeepSeek-V3."""
_MIN_SPEEDUP = 1.05
"""Minimum speedup for a layout to be called faster, larger than the error of the time model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    name: str
    overrides: tuple[str, ...]
    """Settings in the form of `--set`."""
    expected: Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    tried: tuple[Strategy, ...]
    impossible: tuple[tuple[str, str], ...]
    """(name, one-line reason) of each layout that is impossible for the configuration."""
    would_fit: tuple[str, ...] = ()
    """Suggested changes if no layout fits, one line each."""

    @property
    def simplest(self) -> Strategy | None:
        return next((strategy for strategy in self.tried if strategy.expected.fits), None)

    @property
    def fastest(self) -> Strategy | None:
        """The fastest fitting layout if it is worth the complexity, otherwise None."""
        # The time of an optimizer on the host is not modelled, so offloading layouts are never called faster.
        fitting = [each for each in self.tried if each.expected.fits and not each.expected.memory.host]
        simplest = self.simplest
        if simplest is None or not fitting:
            return None
        best = min(fitting, key=lambda strategy: strategy.expected.step_s)
        return best if best.expected.step_s * _MIN_SPEEDUP < simplest.expected.step_s else None


def strategies(config: Config, hardware: Hardware, num_gpus: int) -> Strategies:
    tried: list[Strategy] = []
    impossible: list[tuple[str, str]] = []

    def attempt(name: str, overrides: list[str]) -> Strategy | None:
        try:
            changed = changed_config(config.model_dump(mode="json"), overrides)
            expected = expect(changed, resolve(changed, num_gpus), hardware)
        except ConfigError as error:
            impossible.append((name, str(error)))
            return None
        return Strategy(name=name, overrides=tuple(overrides), expected=expected)

    for rung in _ladder(config, hardware, num_gpus):
        if one := attempt(*rung):
            tried.append(one)
    if (own := attempt("as configured", [])) and not any(_is_same(own.expected, one.expected) for one in tried):
        tried.append(own)
    # fp8 saves no memory, so it is tried only for the layout that is chosen without it.
    found = Strategies(tried=tuple(tried), impossible=())
    if (chosen := found.fastest or found.simplest) and (faster := _in_float8(config, hardware, chosen)):
        one = attempt(*faster)
        # The estimate leaves out the time for scaling and rounding, which would use up a smaller gain.
        if one and one.expected.step_s * _MIN_SPEEDUP < chosen.expected.step_s:
            tried.append(one)
    return Strategies(
        tried=tuple(tried),
        impossible=tuple(impossible),
        would_fit=() if found.simplest else tuple(what_would_fit(config, hardware, num_gpus)),
    )


def _is_same(one: Expected, other: Expected) -> bool:
    return (one.plan, one.memory, one.step_s) == (other.plan, other.memory, other.step_s)


def _ladder(config: Config, hardware: Hardware, num_gpus: int) -> Iterator[tuple[str, list[str]]]:
    node = min(num_gpus, hardware.gpus_per_node)
    nodes = -(-num_gpus // node)
    model = config.model
    sizes = [size for size in (2, 4, 8) if size <= node and num_gpus % size == 0]

    # Options that only some layouts accept are reset to their defaults in the others, which would refuse them.
    own, default = config.parallel, type(config.parallel)()
    optional = {"ep": 1, "cp": 1, "zero1": "false", "cpu_offload": "none", "gradient_compression": "none",
                "reduce_every_microbatch": "false", "stages_per_rank": 0, "stage_costs": [],
                "async_tp": "false"}  # fmt: skip
    plain = {key: str(value) for key, value in optional.items() if getattr(own, key) != getattr(default, key)}

    def mesh(replicate: int, shard: int, tp: int = 1, pp: int = 1, recompute: str = "none", **more: str) -> list[str]:
        if own.float8_all_gather and (1 in (shard, num_gpus // (tp * pp)) or "cpu_offload" in more):
            more["float8_all_gather"] = "false"
        return [
            f"parallel.dp_replicate={replicate}", f"parallel.dp_shard={shard}", f"parallel.tp={tp}",
            f"parallel.pp={pp}", f"train.activation_checkpointing={recompute}", f"train.micro_batch_size={micro}",
            *(f"parallel.{key}={value}" for key, value in {**plain, **more}.items()),
        ]  # fmt: skip

    micro = 0
    accumulates = config.train.global_batch_size > num_gpus
    each: dict[str, Any] = {"reduce_every_microbatch": "true"} if accumulates else {}
    if num_gpus == 1:
        yield "one device", mesh(1, 1)
        yield "one device + recompute", mesh(1, 1, recompute="full")
        micro = 1
        yield "one device + recompute, one sequence a pass", mesh(1, 1, recompute="full")
        yield from _smaller_state(config, "one device + recompute", mesh(1, 1, recompute="full"))
        yield "one device + recompute, all state on the host", mesh(1, 1, recompute="full", cpu_offload="all", **each)
        return
    yield "DDP", mesh(-1, 1)
    yield "DDP, ZeRO-1", mesh(-1, 1, zero1="true")
    yield "FSDP, parameters kept (ZeRO-2)", mesh(1, -1, reshard_after_forward="false")
    yield "FSDP (ZeRO-3)", mesh(1, -1, reshard_after_forward="true")
    if nodes > 1:
        yield "HSDP (shards in a node, replicas across)", mesh(-1, node)
    yield "FSDP + recompute", mesh(1, -1, recompute="full")
    micro = 1
    yield "FSDP + recompute, one sequence a pass", mesh(1, -1, recompute="full")
    if accumulates:  # reducing after each sequence keeps no whole gradients, so all activations may fit
        yield "FSDP, each sequence reduced", mesh(1, -1, **each)
        yield "FSDP + recompute, each sequence reduced", mesh(1, -1, recompute="full", **each)
    yield from _smaller_state(config, "FSDP + recompute", mesh(1, -1, recompute="full", **each))
    for ep in (ep for ep in _EXPERT_SIZES if model.num_experts and model.num_experts % ep == 0 == num_gpus % ep):
        yield f"ep {ep} x FSDP + recompute", mesh(1, -1, recompute="full", ep=str(ep))
        if accumulates:
            yield (
                f"ep {ep} x FSDP + recompute, each sequence reduced",
                mesh(1, -1, recompute="full", ep=str(ep), **each),
            )
    for tp in (tp for tp in sizes if model.num_experts % tp == 0):
        yield f"tp {tp} x FSDP + recompute", mesh(1, -1, tp=tp, recompute="full")
    for cp in sizes if config.data.seq_len >= _LONG_SEQUENCE else ():
        yield f"cp {cp} x FSDP + recompute", mesh(1, -1, recompute="full", cp=str(cp))
    for pp in (2, 4, 8):
        if pp <= nodes and num_gpus % (pp * node) == 0 and model.num_layers >= pp:
            yield f"pp {pp} x FSDP + recompute", mesh(1, -1, pp=pp, recompute="full", schedule="1f1b")
            for tp in reversed(sizes):
                if num_gpus % (pp * tp) == 0 and model.num_experts % tp == 0:
                    options = mesh(1, -1, tp=tp, pp=pp, recompute="full", schedule="1f1b")
                    yield f"pp {pp} x tp {tp} x FSDP + recompute (3-D)", options
                    break
    host = mesh(1, -1, recompute="full", cpu_offload="all", **each)
    yield "FSDP + recompute, all state on the host", host


def _smaller_state(config: Config, name: str, options: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the layout with an 8-bit optimizer, which changes the results of training slightly."""
    if config.optim.name == "adamw":
        yield f"{name}, 8-bit AdamW", [*options, "optim.name=adamw8bit"]


def _in_float8(config: Config, hardware: Hardware, strategy: Strategy) -> tuple[str, list[str]] | None:
    """Return the layout with fp8 matmuls; None if the device does not support them or the configuration is not in
    bf16."""
    kind = next((kind for kind in ("tensorwise", "rowwise") if kind in hardware.flops_per_s), None)
    if kind is None or config.train.float8 != "none" or config.train.precision != "bf16":
        return None
    return f"{strategy.name}, fp8", [*strategy.overrides, f"train.float8={kind}"]
