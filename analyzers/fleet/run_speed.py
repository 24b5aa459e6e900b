"""Speed of one run, with what makes runs comparable: its configuration, and the versions that it ran with.

speed = run_speed(store, run.manifest(), diagnosis.run)
speed.configuration["parallel.dp_shard"]      # "4"
speed.fingerprint                             # "9f31c0de": the same for runs of the same configuration
speed.versions["torch"], speed.per_s          # "2.13.0", 51200.0 tokens per second
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from analyzers.source import Source
from analyzers.stragglers.policy import ThroughputPolicy
from analyzers.stragglers.throughput import step_times

__all__ = ["RunSpeed", "run_speed"]

_SETTINGS = (
    "model.vocab_size", "model.dim", "model.num_layers", "model.num_heads", "model.num_kv_heads", "model.hidden_dim",
    "model.num_experts", "model.experts_per_token", "model.expert_dim", "model.capacity_factor",
    "model.expert_products",
    "data.seq_len", "data.document_mask", "data.num_workers",
    "parallel.schedule", "parallel.stages_per_rank", "parallel.reshard_after_forward", "parallel.reduce_dtype",
    "parallel.reduce_every_microbatch", "parallel.cpu_offload", "parallel.sequence_parallel", "parallel.loss_parallel",
    "parallel.gradient_compression", "parallel.zero1", "parallel.prefetch_blocks",
    "parallel.float8_all_gather",
    "train.global_batch_size", "train.micro_batch_size", "train.precision", "train.activation_checkpointing",
    "train.compile", "train.compile_backend", "train.backend",
    "optim.fused",
)  # fmt: skip
"""Settings that affect the time of a step. The list is explicit, so that a setting added by a newer version does not
change the fingerprint of runs that do not use it."""
_FACTS = ("num_parameters", "world_size", "device_name", "float32_matmul_precision")
MAX_VALUE = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpeed:
    """Speed of the newest attempt of a run."""

    run_id: str
    started_ns: int
    configuration: Mapping[str, str]
    versions: Mapping[str, str]
    num_steps: int
    step_ms: float
    """Median of the committed steps, without checkpoints, evaluations and the first steps."""
    tokens_per_s: float | None = None
    """Tokens of all ranks per second in the median step; None if a step did not record its tokens."""

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits of the configuration."""
        text = json.dumps(sorted(self.configuration.items()))
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    @property
    def per_s(self) -> float:
        """Tokens per second. Without tokens, steps per second."""
        return self.tokens_per_s or 1e3 / self.step_ms

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> RunSpeed:
        """Read plain values. Raises TypeError for malformed values."""
        return cls(**values)


def run_speed(source: Source, manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> RunSpeed | None:
    """Speed of a run; None if the run has too few steps, or is a drill, in which injected faults change the speed."""
    policy = ThroughputPolicy()
    if manifest.get("faults") or facts.get("faults_injected"):
        return None
    times = step_times(source)
    if times is None:
        return None
    measured = slice(min(policy.skip_first, len(times.step) // 4), None)
    duration, tokens = times.duration[measured], times.tokens[measured]
    if len(duration) < policy.block or not np.median(duration) > 0:
        return None
    has_tokens = bool((tokens > 0).all())
    configuration = dict(_configuration(manifest, facts))
    if has_tokens and "train.global_batch_size" not in configuration and (tokens == tokens[0]).all():
        configuration["tokens_per_step"] = str(int(tokens[0]))
    return RunSpeed(
        run_id=str(manifest.get("run_id") or facts.get("run_id") or ""),
        started_ns=_integer(manifest.get("created_wall_ns")),
        configuration=configuration,
        versions=_texts(manifest.get("versions")),
        num_steps=len(duration),
        step_ms=float(np.median(duration)),
        tokens_per_s=float(1e3 / np.median(duration / tokens)) if has_tokens else None,
    )


def _configuration(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Recorded settings and facts; settings that are off or 0 are left out."""
    config = manifest.get("config")
    for name in _SETTINGS:
        section, _, key = name.partition(".")
        settings = config.get(section) if isinstance(config, Mapping) else None
        value = settings.get(key) if isinstance(settings, Mapping) else None
        if value:
            yield name, str(value)[:MAX_VALUE]
    for name in _FACTS:
        if manifest.get(name):
            yield name, str(manifest[name])[:MAX_VALUE]
    command = manifest.get("command")
    if manifest.get("attached") and isinstance(command, list) and command:
        yield "script", PurePath(str(command[0])).name[:MAX_VALUE]
    mesh = facts.get("mesh") or {}
    yield from ((f"mesh.{name}", str(size)) for name, size in mesh.items())
    if facts.get("num_nodes"):
        yield "num_nodes", str(facts["num_nodes"])
    if facts.get("devices"):
        yield "devices", ", ".join(map(str, facts["devices"]))


def _texts(value: Any) -> dict[str, str]:
    """The text values of an object in the manifest; other values are skipped."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name)[:MAX_VALUE]: item[:MAX_VALUE] for name, item in items if isinstance(item, str)}


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
