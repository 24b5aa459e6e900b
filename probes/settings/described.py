"""Facts about a run's model and training from its configuration; None if not stated, as for an attached run.

read(ModelFacts, run.manifest()).num_layers          # `probes.settings.section.read`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["CheckpointFacts", "DataFacts", "ModelFacts", "ParallelFacts", "RunFacts", "TrainFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    section: ClassVar[str] = "run"
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    section: ClassVar[str] = "model"
    dim: float | None = None
    num_layers: float | None = None
    vocab_size: float | None = None
    tie_embeddings: bool = False
    num_experts: float | None = None
    experts_per_token: float | None = None
    multiple_of: float | None = None
    expert_dim: float | None = None
    hidden_dim: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    section: ClassVar[str] = "data"
    seq_len: float | None = None
    num_workers: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelFacts:
    section: ClassVar[str] = "parallel"
    pp: float | None = None
    tp: float | None = None
    cp: float | None = None
    schedule: str = ""
    stages_per_rank: float | None = None
    stage_costs: tuple[float, ...] = ()
    ddp_bucket_mb: float | None = None
    gradient_compression: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFacts:
    section: ClassVar[str] = "train"
    steps: float | None = None
    precision: str | None = None
    loss_scaling: bool | None = None
    """True if the loss is scaled. An attached loop states it; the trainer always scales."""
    eval_interval: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    section: ClassVar[str] = "checkpoint"
    interval: float | None = None
