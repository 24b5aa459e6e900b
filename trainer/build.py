"""Everything that a training loop needs, from a configuration and a plan.

    plan = resolve(config, world_size)                  # before the process group: mistakes are one line
    ...init_process_group...
    training = build(config, plan, device)
    for step in range(config.train.steps):
        batch = training.batch(step + skipped)          # span "data"
        loss = training.forward_backward(batch)         # spans "forward" and "backward", one pair a microbatch
        norm = training.clip()                          # same tensor on all ranks; NaN or Inf, never an exception
        if torch.isfinite(norm): training.step(step)    # span "optimizer"
        else: training.discard()                        # gradients dropped, parameters untouched

`build` needs the default process group if the world has more than one rank. The number of the batch is the caller's:
skipping a batch is adding one to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainer.clipping import clip_factor, gradient_norm, scale_gradients, settle_gradients
from trainer.config import Config, ConfigError
from trainer.data.batches import Batch, BatchStream
from trainer.data.corpus import Corpus, open_corpus
from trainer.mesh_plan import Plan
from trainer.model.transformer import Transformer, initialise
from trainer.optimizer import build_optimizer, learning_rate, named_parameters, set_learning_rate
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import COMPUTE_DTYPES, ParallelModel, parallelize
from trainer.precision import LossScaler

__all__ = ["Recorder", "Training", "build", "pick_backend", "pick_device"]


class Recorder(Protocol):
    """What of the probes' recorder is used here."""

    def span(self, kind: str, microbatch: int = ...) -> AbstractContextManager[object]: ...


class _NoRecorder:
    def span(self, kind: str, microbatch: int = -1) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


def pick_device(config: Config, local_rank: int) -> torch.device:
    """The device of this rank. Raises ConfigError where what is configured is not there."""
    wanted = config.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda': no CUDA device is available; allowed here: cpu, auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError("train.precision = 'bf16': this GPU has no bf16; allowed: float32, fp16")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def pick_backend(config: Config, device: torch.device) -> str:
    """gloo or nccl. Raises ConfigError for nccl without a GPU."""
    wanted = config.train.backend
    if wanted == "nccl" and device.type != "cuda":
        raise ConfigError(f"train.backend = 'nccl': needs train.device = 'cuda', not {device.type!r}; allowed: gloo")
    if wanted == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    return wanted


def build(
    config: Config,
    plan: Plan,
    device: torch.device,
    *,
    recorder: Recorder | None = None,
    corpus: Corpus | None = None,
) -> Training:
    """Make model, optimizer and data for this rank. Collective: all ranks call it at the same time.

    Raises ConfigError for data that cannot be used.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    corpus = corpus or open_corpus(config.data, config.model.vocab_size)
    mesh = build_mesh(plan, device.type)
    module = Transformer(config.model)
    initialise(module, config.model, config.run.seed)
    parts = [parallelize(module, config, plan, mesh, device)]
    modules: list[nn.Module] = [part.module for part in parts]
    return Training(
        config=config,
        plan=plan,
        device=device,
        rank=rank,
        mesh=mesh,
        parts=parts,
        optimizer=build_optimizer(modules, config.optim),
        stream=_stream(config, corpus, "train"),
        validation=_stream(config, corpus, "validation") if config.data.validation_ratio else None,
        scaler=LossScaler() if config.train.precision == "fp16" else None,
        recorder=recorder or _NoRecorder(),
    )


def _stream(config: Config, corpus: Corpus, split: str) -> BatchStream:
    return BatchStream(
        corpus,
        seq_len=config.data.seq_len,
        global_batch_size=config.train.global_batch_size,
        seed=config.run.seed,
        validation_ratio=config.data.validation_ratio,
        split=split,
    )


@dataclass(kw_only=True)
class Training:
    """One rank's model parts, optimizer and data, and the phases of a step."""

    config: Config
    plan: Plan
    device: torch.device
    rank: int
    mesh: DeviceMesh | None
    parts: list[ParallelModel]
    optimizer: torch.optim.AdamW
    stream: BatchStream
    validation: BatchStream | None
    scaler: LossScaler | None
    recorder: Recorder = field(default_factory=_NoRecorder)

    @property
    def modules(self) -> list[Transformer]:
        """The rank's model parts (one without a pipeline); parameters have their names in the whole model."""
        return [part.module for part in self.parts]

    @property
    def has_loss(self) -> bool:
        """Whether `forward_backward` returns a real loss on this rank: not on the first stages of a pipeline."""
        return self.modules[-1].head is not None

    @property
    def data_rank(self) -> int:
        return self.plan.data_rank(self.rank)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names like `blocks.3.mlp.up.weight`; DTensors where sharded; the same in every layout."""
        yield from named_parameters(self.modules)

    def batch(self, batch_index: int) -> Batch:
        """This rank's share of global batch `batch_index`, on the device."""
        with self.recorder.span("data"):
            return self.stream.batch(batch_index, self.data_rank, self.plan.data_size).to(self.device)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the rank's rows of `batch`; returns its mean loss, a detached float32 scalar.

        The gradients are those of the mean over the whole global batch, reduced over the data ranks with the last
        microbatch. The loss is this rank's own: `global_mean` makes it the batch's.
        """
        self._seed_dropout(batch.index)
        (part,) = self.parts
        part.module.train()
        count, size = self.plan.num_microbatches, self.plan.micro_batch_size
        total = torch.zeros((), device=self.device)
        for number in range(count):
            rows = slice(number * size, (number + 1) * size)
            part.synchronise_gradients(number == count - 1)
            with self._loss_context():
                with self.recorder.span("forward", microbatch=number), self._autocast():
                    loss = self.loss(part.forward_module(batch.inputs[rows]), batch.targets[rows]) / count
                with self.recorder.span("backward", microbatch=number):
                    (loss if self.scaler is None else loss * self.scaler.scale).backward()
            total += _local(loss.detach())
        return total

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a token, in float32; logits may be split along the vocabulary."""
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def global_mean(self, loss: Tensor) -> Tensor:
        """Mean over the global batch, the same on every rank. Collective over all ranks; one number."""
        if not dist.is_initialized() or self.plan.world_size == 1:
            return loss
        # Each tensor-parallel rank adds the same loss; pipeline ranks without one add nothing.
        copies = self.plan.data_size * self.plan.tp
        total = loss / copies if self.has_loss else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total

    def clip(self) -> Tensor:
        """Clip gradients to `optim.clip_norm` and return the global norm before that (unscaled in fp16).

        A float32 scalar on the device, equal on all ranks; NaN or Inf if any gradient is. Collective, asynchronous.
        """
        with self.recorder.span("optimizer"):
            parameters = [parameter for _, parameter in self.named_parameters()]
            if self.plan.tp > 1:
                settle_gradients(parameters)
            norm = gradient_norm(parameters, self.plan.world_size // self.plan.pp, self.device)
            scale = 1.0 if self.scaler is None else self.scaler.scale
            norm = norm / scale
            if self.config.optim.clip_norm or scale != 1.0:
                limit = self.config.optim.clip_norm or float("inf")
                scale_gradients(parameters, clip_factor(norm, limit).clamp(max=1.0) / scale)
            return norm

    def absorb_overflow(self, norm: float) -> bool:
        """fp16: whether a norm that is not finite is only the loss scale's doing; drops the step if so.

        Always False in other precisions and for finite norms. Ask it before calling the step a fault.
        """
        if self.scaler is None or not self.scaler.absorbs(norm):
            return False
        self.discard()
        return True

    def step(self, step: int) -> float:
        """Take optimizer step `step` (from 0) and clear the gradients; returns the learning rate used."""
        with self.recorder.span("optimizer"):
            rate = learning_rate(step, self.config)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.discard()
            if self.scaler is not None:
                self.scaler.succeeded()
            return rate

    def discard(self) -> None:
        """Drop the accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def _loss_context(self) -> AbstractContextManager[object]:
        """DTensor's cross-entropy on split logits; its backward must run inside too."""
        if self.plan.tp > 1 and self.config.parallel.loss_parallel:
            return loss_parallel()
        return contextlib.nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        """Mixed precision where FSDP's own policy does not already do it."""
        dtype = COMPUTE_DTYPES[self.config.train.precision]
        if dtype == torch.float32 or self.plan.data_parallel_kind in ("fsdp", "hsdp"):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def _seed_dropout(self, batch_index: int) -> None:
        """Dropout is a function of (seed, batch, data rank): equal inside a tp group, repeatable after a rollback."""
        if self.config.model.dropout:
            shard = self.plan.coordinates(self.rank)["tp"] if self.config.parallel.sequence_parallel else 0
            key = (self.config.run.seed, batch_index, self.data_rank, shard)
            torch.manual_seed(hash(key) & (2**63 - 1))


def _local(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
