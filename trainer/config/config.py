"""The trainer's configuration: a pydantic model with a class per section. `trainer.config.load` reads it.

`trainer.layout.plan.resolve` checks what depends on the number of ranks.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from probes.settings.sections import ProbesSettings, PublishSettings
from store.published.address import check_address
from trainer.config.export import AlertsConfig, MetricsConfig, OtelConfig, TrackersConfig
from trainer.config.model import ModelConfig
from trainer.config.parallel import ParallelConfig
from trainer.config.profiler import ProfilerConfig
from trainer.config.recovery import RecoveryConfig
from trainer.config.section import Section, shared_default

__all__ = ["Config", "ModelConfig", "ParallelConfig"]


class RunConfig(Section):
    name: str = Field(default="run", min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is `<dir>/<name>-<time>`."""
    dir: str = Field(default="runs", min_length=1)
    """Folder that holds all runs."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed for weights, data order and dropout."""


class DataConfig(Section):
    path: list[str] = Field(default_factory=list)
    """Folders written by `rankscope prepare` (several form a mixture), text files, Parquet files, `datasets` folders,
    or one nanoGPT `.bin` with its `.json`; empty = the source code of Python's standard library."""
    weights: list[float] = Field(default_factory=list)
    """Mixture: share of the sequences from each folder in `path`, in any unit; empty = by size."""
    epochs: list[float] = Field(default_factory=list)
    """Mixture, instead of `weights`: how often each folder is read per pass over the mixture."""
    validation: dict[str, str] = Field(default_factory=dict)
    """Prepared folders by name, used as validation sets; all of `path` is then used for training."""
    column: str = ""
    """Column of Parquet and `datasets`: text or lists of tokens; empty = input_ids, tokens, text or content."""
    seq_len: int = Field(default=256, ge=2)
    """Tokens of a sequence."""
    validation_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tokens, at the end of each corpus, kept for evaluation; not used with `validation`."""
    cache_dir: str = ""
    """Cache of tokens between runs; empty = `$XDG_CACHE_HOME/rankscope` or `~/.cache/rankscope`."""
    document_mask: bool = False
    """A token attends only to its own packed document, which ends at `separator`."""
    separator: int = Field(default=0, ge=0)
    """Token that ends a document; 0 for text, 50256 for GPT-2's tokens."""
    num_workers: int = Field(default=0, ge=0)
    """Worker processes that prepare batches; 0 = prepare them in the training process."""
    prefetch: int = Field(default=2, ge=1)
    """Batches that each worker prepares ahead."""
    pin_memory: bool = True
    """Page-locked host memory for batches (CUDA only)."""

    @model_validator(mode="after")
    def _check_mixture(self) -> DataConfig:
        for name in ("weights", "epochs"):
            values = getattr(self, name)
            if values and len(values) != len(self.path):
                raise ValueError(f"data.{name} = {values}: needs a number for each of the {len(self.path)} data.path")
            if values and not (min(values) >= 0 and sum(values) > 0 and all(map(math.isfinite, values))):
                raise ValueError(f"data.{name} = {values}: none may be negative, and one must be above 0")
        if self.weights and self.epochs:
            raise ValueError("data.weights and data.epochs are mutually exclusive: set one of them")
        return self


class TrainConfig(Section):
    steps: int = Field(default=200, ge=1)
    """Optimizer steps."""
    global_batch_size: int = Field(default=16, ge=1)
    """Sequences per step, over all ranks."""
    micro_batch_size: int = Field(default=0, ge=0)
    """Sequences of one forward pass on a rank; 0 = the rank's share, in a pipeline divided by 2 x `parallel.pp`."""
    eval_interval: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 = never."""
    eval_batches: int = Field(default=8, ge=1)
    """Global batches per evaluation."""
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Precision of the computation; parameters, gradient reduction and optimizer stay float32."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Matrix products of the blocks in fp8, by torchao (`rankscope[fp8]`): one scale per tensor, or one per row, which
    is more exact and slower."""
    float8_emulated: bool = False
    """With `float8`: round to fp8 and multiply in float32, on any device; slow, to see the effect of fp8 on the
    loss."""
    activation_checkpointing: Literal["none", "full", "every_n", "selective"] = "none"
    """What backward recomputes: nothing, every block, every n-th block, or all but matrix products and attention."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with `torch.compile`; auto = on CUDA, if its packages and a C compiler are installed."""
    compile_backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """inductor generates kernels; the other backends only trace, for machines without a C++ compiler or for
    debugging."""
    chunked_loss: bool | Literal["auto"] = "auto"
    """Compute output layer and loss some thousand tokens at a time, without the logits of a whole batch; not in a
    pipeline; auto = on CUDA."""
    checkpoint_every_n: int = Field(default=2, ge=1)
    """With `every_n`: every n-th block is recomputed."""
    log_interval: int = Field(default=1, ge=1)
    """Steps between progress lines."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto = cuda if available."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto = nccl on cuda, gloo on cpu."""


class OptimConfig(Section):
    name: Literal["adamw", "muon", "adamw8bit"] = "adamw"
    """muon = Muon for the blocks' matrices, AdamW for embedding, head and norms; adamw8bit = AdamW with 8-bit moments
    for all matrices but the embedding."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, for matrices other than the embedding."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """With `muon`: decay of the momentum of its matrices."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 = measure without clipping."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final / peak learning rate."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """With `wsd`: share of the steps in which the learning rate falls."""
    reference_batch_size: int = Field(default=0, ge=0)
    """Batch size for which `lr` was chosen: `lr` scales linearly with the global batch size; 0 = no scaling."""
    fused: bool = True
    """Fused AdamW: one kernel for the whole update, several times faster with sharded parameters."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas = {list(self.betas)}: each must be at least 0 and below 1")
        return self


class ProbesConfig(Section):
    enabled: bool = True
    """Record what every rank does."""
    gradient_interval: int = Field(default=10, ge=0)
    """Steps between per-parameter gradient statistics; 0 = only the global norm."""
    expert_interval: int = Field(default=10, ge=0)
    """Steps between rows of expert use, which cover all steps since the previous row; 0 = never."""
    compression_interval: int = Field(default=50, ge=0)
    """Steps between measurements of the error of `parallel.gradient_compression`, each of which takes one more
    reduction; 0 = never."""
    collectives: bool = True
    """Record every collective."""
    nonfinite_flags: bool = True
    """Check inputs of reductions, gathers and all-to-alls for NaN and Inf."""
    local_norm_interval: int = Field(default=5, ge=0)
    """Steps between measurements of each rank's gradient norm before reduction, which show the gradient's noise; 0 =
    never."""
    fingerprint_interval: int = Field(default=50, ge=0)
    """Steps between comparisons of parameters and optimizer state over replicas, in addition to the comparison at every
    copy; 0 = never."""
    chain_interval: int = Field(default=0, ge=0)
    """Steps between checks that only the optimizer changed state with fewer than three replicas; 0 = never."""
    sample_stacks: bool = shared_default(ProbesSettings, "sample_stacks")
    """While a rank is slow, take about twenty Python stacks of it and of one peer, to report the line of code."""
    sync_s: float = shared_default(ProbesSettings, "sync_s")
    """Seconds between syncs of the records to disk by `watch`: the most that a power cut loses; 0 = left to the
    kernel."""
    retain: Literal["all", "window"] = shared_default(ProbesSettings, "retain")
    """Keep all records, or only tapes and single calls of the last `retain_s` seconds. With `window`, older calls
    become totals per step and group, except in every 64th step, and the records of older tapes exist only in the
    store."""
    retain_s: float = shared_default(ProbesSettings, "retain_s")
    """The window of `retain = "window"`."""
    budget_mb: float = shared_default(ProbesSettings, "budget_mb")
    """Limit on tapes and store in MB per rank and hour; `watch` shortens the window to keep it; needs `retain =
    "window"`; 0 = none."""
    health: bool = shared_default(ProbesSettings, "health")
    """`watch` samples host and GPUs once a second."""
    dcgm_url: str = shared_default(ProbesSettings, "dcgm_url", pattern=r"^(https?://.+)?$")
    """`/metrics` of a dcgm-exporter that replaces NVML as source of GPU readings."""

    @model_validator(mode="after")
    def _check_budget(self) -> ProbesConfig:
        if self.budget_mb and self.retain != "window":
            raise ValueError('probes.budget_mb needs probes.retain = "window": without it nothing is removed')
        return self


class CheckpointConfig(Section):
    interval: int = Field(default=50, ge=0)
    """Steps between checkpoints on disk; 0 = only at the end."""
    asynchronous: bool = True
    """Write to disk in the background; training waits only for the copy to host memory."""
    keep: int = Field(default=3, ge=1)
    """Good checkpoints kept on disk, in addition to those not yet marked good."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints of steps that are multiples of this are never removed; 0 = none, else a multiple of `interval`."""
    memory_interval: int = Field(default=10, ge=0)
    """Steps between copies in memory; 0 = none."""
    memory_survives: bool = True
    """Keep the copies in shared memory, so that a restart can use them; turned off if they do not fit."""
    memory_on_peer: bool = True
    """With several nodes: keep each copy in the memory of another node too, so that the copies survive a lost node."""
    resume: bool = True
    """Start from the newest intact checkpoint of the run; false starts over, in this launch only, and moves old
    checkpoints aside."""
    remote: str = Field(default="", pattern=r"^([A-Za-z0-9+.:_-]+://.+)?$")
    """fsspec URL, such as `s3://bucket/folder`, below which a folder named after the run gets a copy of each
    checkpoint; empty = none."""
    remote_limit_s: float = Field(default=3600.0, gt=0)
    """Time limit (seconds) for sending one checkpoint and for fetching at a start. After it, sending is tried again,
    and the start uses the checkpoints on disk or fails. Training never waits for a transfer."""

    @field_validator("remote")
    @classmethod
    def _check_remote(cls, value: str) -> str:
        # Addresses of Azure name a container before the @, so only one with a password is refused.
        if re.match(r"[^/]*//[^/@]*:[^/@]*@", value):
            raise ValueError("keys do not belong in an address: set AWS_ACCESS_KEY_ID instead")
        return value


class PublishConfig(Section):
    address: str = shared_default(PublishSettings, "address")
    """Folder or bucket (file:// or s3://) to which `watch` publishes the records of its node; empty = none."""
    every_s: float = shared_default(PublishSettings, "every_s")
    """Seconds between publications, each of which writes a file per table."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str) -> str:
        if value:
            check_address(value)
        return value


class Config(Section):
    """Complete configuration of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    probes: ProbesConfig = Field(default_factory=ProbesConfig)
    profiler: ProfilerConfig = Field(default_factory=ProfilerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    alerts: AlertsConfig = Field(default_factory=AlertsConfig)
    otel: OtelConfig = Field(default_factory=OtelConfig)
    publish: PublishConfig = Field(default_factory=PublishConfig)
    trackers: TrackersConfig = Field(default_factory=TrackersConfig)

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        model, data = self.model, self.data
        if model.dim % (2 * model.num_heads):
            raise ValueError(
                f"model.num_heads = {model.num_heads}: model.dim = {model.dim} must be a multiple of twice the heads"
            )
        if model.num_heads % model.kv_heads:
            raise ValueError(f"model.num_kv_heads = {model.kv_heads}: must divide model.num_heads = {model.num_heads}")
        chosen = [
            name for name in ("interval", "ranges", "on_anomaly", "memory_history") if getattr(self.profiler, name)
        ]
        if chosen and not self.probes.enabled:
            raise ValueError(f"profiler.{chosen[0]} needs probes.enabled = true")
        if self.recovery.on_straggler != "report" and not self.probes.enabled:
            raise ValueError("recovery.on_straggler needs probes.enabled = true: without it ranks are not timed")
        every, interval = self.checkpoint.keep_every, self.checkpoint.interval
        if every and (not interval or every % interval):
            raise ValueError(
                f"checkpoint.keep_every = {every}: must be a multiple of checkpoint.interval = {interval}, or 0"
            )
        if data.seq_len > model.max_seq_len:
            raise ValueError(f"data.seq_len = {data.seq_len}: at most model.max_seq_len = {model.max_seq_len}")
        if not data.path and model.vocab_size < 256:
            raise ValueError(f"model.vocab_size = {model.vocab_size}: bytes of text need at least 256")
        return self
