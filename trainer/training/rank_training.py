"""Model parts, optimizer and data of one rank, and the phases of a step.

It is made by `trainer.training.build.build`. The docstring of that module shows the loop that uses it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from probes.recorder import NullRecorder, Recorder
from probes.tape import event_kinds
from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.data.batches import Batch, BatchStream
from trainer.data.prefetch import Prefetcher
from trainer.data.to_device import ToDevice
from trainer.layout.plan import Plan
from trainer.model.experts import MixtureOfExperts
from trainer.model.initial_weights import initialise
from trainer.model.transformer import Transformer
from trainer.model.weights import load_weights
from trainer.parallel.compression import GradientCompression
from trainer.parallel.parallelize import COMPUTE_DTYPES, ParallelModel
from trainer.parallel.pipeline import Pipeline
from trainer.training.clipping import (
    ClipNumbers,
    ClipResult,
    LocalGradients,
    clip_factor,
    gradient_norm,
    scale_gradients,
    settle_gradients,
)
from trainer.training.loss import token_loss
from trainer.training.optimizer import learning_rate, named_parameters, set_learning_rate
from trainer.training.precision import LossScaler

__all__ = ["Training"]

_BYTES_OF_LOGITS = 3 * 4
"""Bytes per token and vocabulary entry: logits, softmax and gradients in float32."""
_SHARE_FOR_LOGITS = 0.1
"""Maximum share of the device's memory for whole logits."""


@dataclass(kw_only=True)
class Training:
    """See the module's docstring. Call every method on all ranks."""

    config: Config
    plan: Plan
    device: torch.device
    rank: int
    mesh: DeviceMesh | None
    parts: list[ParallelModel]
    optimizer: torch.optim.Optimizer
    stream: BatchStream
    loader: Prefetcher  # loads this rank's batches of `stream`
    validation: dict[str, BatchStream]  # by name; the name is empty for the held-out end of a single corpus
    scaler: LossScaler | None = None
    pipeline: Pipeline | None = None
    loss_in_chunks: bool = False
    """True if the model computes the loss in chunks, without whole logits."""
    recorder: Recorder = field(default_factory=NullRecorder)

    @functools.cached_property
    def modules(self) -> list[Transformer]:
        """The rank's model parts (one without a pipeline); parameters have their names in the whole model."""
        return [part.module for part in self.parts]

    @functools.cached_property
    def has_loss(self) -> bool:
        """True if `forward_backward` returns a real loss on this rank: in a pipeline, on its last stage."""
        return self.modules[-1].head is not None

    @property
    def data_rank(self) -> int:
        return self.plan.data_rank(self.rank)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by names such as `blocks.3.mlp.up.weight`, which are the same in every layout; sharded ones are
        DTensors."""
        yield from named_parameters(self.modules)

    def fill_weights(self) -> None:
        """Initialise the parameters, from `model.weights` or else randomly.

        Raises ConfigError, one line, for weights that cannot be used.
        """
        model, seed = self.config.model, self.config.run.seed
        for module in self.modules:
            if model.weights:
                load_weights(module, Path(model.weights).expanduser())
            else:
                initialise(module, model, seed)

    def batch(self, batch_index: int) -> Batch:
        """This rank's share of global batch `batch_index`, on the device."""
        with self.recorder.span("data"):
            return self._to_device(self.own_piece(self.loader.batch(batch_index)))

    @functools.cached_property
    def _to_device(self) -> ToDevice:
        return ToDevice(self.device)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of the rank's rows of `batch`; returns its mean loss, a detached float32 scalar.

        They are the gradients of the mean over the whole global batch, and are reduced over the data ranks with the
        last microbatch. The loss is this rank's own, zero where `has_loss` is false: see `global_mean` for the batch's.
        In a pipeline, the probes record spans from its stages.
        """
        self._seed_dropout(batch.index)
        self._rescale()
        for module in self.modules:
            if not module.training:  # only after an evaluation, because `train()` walks through every module
                module.train()
        self._scale_router_losses()
        if self.pipeline is not None:
            with self._loss_context(), self._autocast():
                loss = self.pipeline.run(batch.inputs, batch.targets)
            return loss if self.scaler is None else loss / self.scaler.scale
        (part,) = self.parts
        count = self.plan.num_microbatches
        losses = []
        for number, rows in enumerate(self._microbatches()):
            part.synchronise_gradients(number == count - 1)
            with self._loss_context():
                with self.recorder.span("forward", microbatch=number), self._autocast():
                    loss = self._loss(part.forward_module, batch, rows)
                    loss = loss / count if count > 1 else loss
                with self.recorder.span("backward", microbatch=number):
                    (loss if self.scaler is None else loss * self.scaler.scale).backward()  # type: ignore[no-untyped-call]  # torch: no types
            losses.append(loss.detach())
        return losses[0] if count == 1 else torch.stack(losses).sum()

    def _rescale(self) -> None:
        """Compute the scales of fp8 gathers before a forward, not after an update: a restored checkpoint or copy and an
        injected fault change parameters, too."""
        for part in self.parts:
            part.rescale()

    def _scale_router_losses(self) -> None:
        """Scale the routers' losses, which backward adds, like the loss: by microbatches, in fp16 by its scale."""
        scale = 1.0 if self.scaler is None else self.scaler.scale
        for layer in self.expert_layers.values():
            layer.loss_scale = scale / self.plan.num_microbatches

    @functools.cached_property
    def expert_layers(self) -> dict[int, MixtureOfExperts]:
        """Mixtures of experts on this rank, by their block's number; empty for other models."""
        blocks = {int(number): block for module in self.modules for number, block in module.blocks.items()}
        return {number: block.mlp for number, block in blocks.items() if isinstance(block.mlp, MixtureOfExperts)}

    @torch.no_grad()
    def evaluate_sets(self, num_batches: int | None = None) -> dict[str, Tensor]:
        """Mean loss over the first `num_batches` (default `train.eval_batches`) batches of each validation set, on
        every rank.

        Raises ConfigError if there is no validation set. Collective.
        """
        if not self.validation:
            raise ConfigError("data.validation_ratio = 0: there is nothing to evaluate on; must be above 0")
        num_batches = num_batches or self.config.train.eval_batches
        for module in self.modules:
            module.eval()
        self._rescale()
        losses = {name: self._mean_loss(stream, num_batches) for name, stream in self.validation.items()}
        for part in self.parts:
            part.reshard()
        return {name: self.global_mean(loss) for name, loss in losses.items()}

    def _mean_loss(self, stream: BatchStream, num_batches: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        for index in range(num_batches):
            batch = self.own_piece(stream.batch(index, self.data_rank, self.plan.data_size)).to(self.device)
            with self._loss_context(), self._autocast():
                total += self._batch_loss(batch)
        return total / num_batches

    def _batch_loss(self, batch: Batch) -> Tensor:
        if self.pipeline is not None:
            loss = self.pipeline.evaluate(batch.inputs, batch.targets)
            return loss if self.scaler is None else loss / self.scaler.scale
        (part,) = self.parts
        losses = [self._loss(part.module, batch, rows) for rows in self._microbatches()]
        return torch.stack(losses).mean()

    def _loss(self, module: nn.Module, batch: Batch, rows: slice) -> Tensor:
        inputs, targets = batch.inputs[rows], batch.targets[rows]
        if self.loss_in_chunks:
            loss: Tensor = module(inputs, targets)
            return loss
        return token_loss(module(inputs), targets)

    def own_piece(self, batch: Batch) -> Batch:
        """Under context parallelism, this rank's part of each sequence; otherwise the whole batch."""
        return batch.select_chunks(*self.plan.chunks(self.rank, self.config.parallel.cp_exchange))

    def _microbatches(self) -> Iterator[slice]:
        size = self.plan.micro_batch_size
        return (slice(start, start + size) for start in range(0, self.plan.local_batch_size, size))

    def global_mean(self, loss: Tensor) -> Tensor:
        """Mean over the global batch, the same on every rank. Collective over all ranks; one number."""
        if not dist.is_initialized() or self.plan.world_size == 1:
            return loss
        # Each tensor-parallel rank adds the same loss; pipeline ranks that have no loss add nothing.
        copies = self.plan.loss_copies
        total = loss / copies if self.has_loss else torch.zeros_like(loss)
        dist.all_reduce(total)
        return total

    def clip(self, *summed: Tensor, own: Sequence[Tensor] = ()) -> ClipResult:
        """Clip gradients to `optim.clip_norm`. Collective.

        `summed` (rows of float64 on the device) is summed over all ranks in the norm's reduction; `own` is read back
        unreduced. Synchronises: the host waits for the device here, once for all numbers.
        """
        with self.recorder.span("optimizer"):
            return self._clip(summed, own).read()

    def clip_unread(self, *summed: Tensor, own: Sequence[Tensor] = (), waits: bool = False) -> ClipNumbers:
        """Like `clip`, but leaves the numbers on the device until they are read, or copies them at once if `waits`."""
        with self.recorder.span("optimizer"):
            numbers = self._clip(summed, own)
            if waits:
                numbers.wait()
            return numbers

    def _clip(self, summed: Sequence[Tensor], own: Sequence[Tensor]) -> ClipNumbers:
        if self.plan.tp > 1:
            settle_gradients(parameter for _, parameter in self.named_parameters())
        gradients = self._shards.by_copies()
        row = gradient_norm(gradients, self.device, summed)
        norm, limit = row[0], self.config.optim.clip_norm or math.inf
        if self.scaler is not None:
            norm /= self.scaler.scale
            scale_gradients(gradients, clip_factor(norm, limit) / self.scaler.scale)
        elif limit < math.inf:
            scale_gradients(gradients, clip_factor(norm, limit))
        return ClipNumbers(torch.cat((row, *own)) if own else row, row.numel() - 1)

    @functools.cached_property
    def _shards(self) -> LocalGradients:
        parameters = (parameter for _, parameter in self.named_parameters())
        return LocalGradients(parameters, self.plan.world_size // self.plan.pp)

    def absorb_overflow(self, norm: float) -> bool:
        """Return True, and drop the step, if a non-finite norm in fp16 only comes from too large a loss scale.

        Always False in other precisions and for finite norms. Call it before judging the step.
        """
        if self.scaler is None or not self.scaler.absorbs(norm):
            return False
        self.discard()
        if self.rank == 0:
            self.recorder.event(event_kinds.LOSS_SCALE, scale=self.scaler.scale)
        return True

    def step(self, step: int, *, leave_out: Tensor | None = None) -> float:
        """Take optimizer step `step` (from 0) and clear the gradients; returns the learning rate used.

        `leave_out`: a device tensor, 1 to skip the update; the fused kernel reads it, the host does not.
        """
        with self.recorder.span("optimizer"):
            rate = learning_rate(step, self.config)
            set_learning_rate(self.optimizer, rate)
            self.optimizer.found_inf = leave_out  # type: ignore[attr-defined]  # as torch's GradScaler does
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.scaler is not None:
                self.scaler.succeeded()
            return rate

    def discard(self) -> None:
        """Drop the accumulated gradients and the error feedback of compression, and free parameters that an interrupted
        step has left gathered."""
        self.drop_gradients()
        for compression in self.compressions:
            compression.forget()

    def drop_gradients(self) -> None:
        """Drop gradients that were computed `without_side_effects`."""
        self.optimizer.zero_grad(set_to_none=True)
        for part in self.parts:
            part.reshard()

    @functools.cached_property
    def compressions(self) -> list[GradientCompression]:
        """Gradient compression of this rank's model parts; empty if gradients are not compressed."""
        return [part.compression for part in self.parts if part.compression is not None]

    def sample_compression(self, wanted: bool) -> None:
        """Switch the measurement of the compression error for the next backward."""
        for compression in self.compressions:
            compression.sample = wanted

    def compression_squares(self) -> Tensor | None:
        """Return (squared error, square) of the reduced gradient, (2,) float64; None if that was not sampled."""
        sampled = [squares for part in self.compressions if (squares := part.squares()) is not None]
        return torch.stack(sampled).sum(0) if sampled else None

    @contextlib.contextmanager
    def without_side_effects(self) -> Iterator[None]:
        """Context for a step without side effects: gradients are reduced without compression, error feedback does not
        change, and expert load is not counted. Uses whole logits if they fit, so that each layer's output can be
        examined."""

        def set_active(active: bool) -> None:
            for compression in self.compressions:
                compression.active = active
            for layer in self.expert_layers.values():
                layer.counts_load = active

        set_active(False)
        chunked = self.loss_in_chunks
        self.loss_in_chunks = chunked and not self._whole_logits_fit()
        try:
            yield
        finally:
            self.loss_in_chunks = chunked
            set_active(True)

    def _whole_logits_fit(self) -> bool:
        """Return True if whole logits are small for the device. Ranks agree, since free memory does not matter."""
        if self.device.type != "cuda":
            return True
        tokens = self.plan.micro_batch_size * self.config.data.seq_len // self.plan.cp
        logits = tokens * self.config.model.vocab_size // self.plan.tp
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return logits * _BYTES_OF_LOGITS < memory * _SHARE_FOR_LOGITS

    def close(self) -> None:
        """End the data workers. Calling it twice, or never, is harmless."""
        self.loader.close()

    def _loss_context(self) -> AbstractContextManager[object]:
        """Context of DTensor's cross-entropy on sharded logits; backward must run inside it, too."""
        if self.plan.tp > 1 and self.config.parallel.loss_parallel:
            return loss_parallel()
        return contextlib.nullcontext()

    def _autocast(self) -> AbstractContextManager[object]:
        """Autocast context for mixed precision, unless FSDP's own policy already handles it."""
        dtype = COMPUTE_DTYPES[self.config.train.precision]
        if dtype == torch.float32 or self.plan.data_parallel_kind in ("fsdp", "hsdp"):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def _seed_dropout(self, batch_index: int) -> None:
        """Seed dropout from (seed, batch, data rank), so that it is reproduced after a rollback.

        Ranks of a tp group use the same seed, unless each has its own part of the sequence. Pipeline ranks differ, or
        the blocks of all stages would drop the same values.
        """
        if self.config.model.dropout:
            at, plan = self.plan.coordinates(self.rank), self.plan
            shard = (at["pp"] * plan.cp + at["cp"]) * plan.tp
            shard += at["tp"] if self.config.parallel.sequence_parallel else 0
            key = np.random.SeedSequence([self.config.run.seed, batch_index, self.data_rank, shard])
            torch.manual_seed(int(key.generate_state(1, dtype=np.uint64)[0] >> 1))
