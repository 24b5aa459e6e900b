"""Pipeline parallelism with `torch.distributed.pipelining`: this rank's stages and the schedule that runs them.

    pipeline = Pipeline(parts, config, plan, mesh, device, pp_rank, loss)
    loss = pipeline.run(batch.inputs, batch.targets)        # forward and backward of all microbatches

The shapes of the messages between stages are known and passed to torch. Without them, torch would determine the shapes
by an extra forward and backward pass on the first batch, with unwanted gradients and collectives. `stages` and
`schedule` are torch's own objects. The probes hook their `forward_one_chunk` and `backward_one_chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from trainer.config.config import Config
from trainer.layout.plan import Plan
from trainer.model.transformer import Transformer
from trainer.parallel.mesh import submesh
from trainer.parallel.parallelize import COMPUTE_DTYPES, ParallelModel

__all__ = ["Pipeline", "stage_modules"]

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


def stage_modules(config: Config, plan: Plan, pp_rank: int) -> list[Transformer]:
    """The rank's parts of the model, one per stage; without a pipeline, one part with the whole model."""
    last = plan.stages.count - 1
    separator = config.data.separator if config.data.document_mask else None
    return [
        Transformer(
            config.model, plan.stages.layers[number], first=number == 0, last=number == last, separator=separator
        )
        for number in plan.stages.of_rank[pp_rank]
    ]


class Pipeline:
    """The stages of one rank under a schedule."""

    def __init__(
        self,
        parts: list[ParallelModel],
        config: Config,
        plan: Plan,
        mesh: DeviceMesh | None,
        device: torch.device,
        pp_rank: int,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        pp_mesh = submesh(mesh, "pp")
        assert pp_mesh is not None
        self._config, self._plan, self._loss = config, plan, loss
        self.stages = [
            PipelineStage(
                part.forward_module,
                number,
                plan.stages.count,
                device,
                input_args=_tokens(config, plan) if part.module.embed is not None else _hidden(config, plan),
                output_args=_logits(config, plan) if part.module.head is not None else _hidden(config, plan),
                group=pp_mesh.get_group(),
            )
            for part, number in zip(parts, plan.stages.of_rank[pp_rank], strict=True)
        ]
        count = plan.num_microbatches
        single = config.parallel.schedule in ("gpipe", "1f1b")
        # The loss is already divided by the number of microbatches, so torch must not divide the gradients again.
        self.schedule = _SCHEDULES[config.parallel.schedule](
            self.stages[0] if single else self.stages,
            count,
            loss_fn=lambda logits, targets: loss(logits, targets) / count,
            scale_grads=False,
        )

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate gradients over all microbatches. Returns the mean loss on the rank with the last stage, and zero
        on other ranks.
        """
        losses: list[Tensor] = []
        self.schedule.step(
            *((inputs,) if self.stages[0].is_first else ()),
            target=targets if self.stages[-1].is_last else None,
            losses=losses if self.stages[-1].is_last else None,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=inputs.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Run forward only; returns the same as `run`.

        torch's `schedule.eval` fails if two neighbouring stages share a rank, and exchanges shapes again at every
        change between training and evaluation. Here each rank runs its forward passes by microbatch and then by stage,
        an order in which ranks cannot block each other.
        """
        size, count = self._plan.micro_batch_size, self._plan.num_microbatches
        losses = []
        for rows in (slice(start, start + size) for start in range(0, count * size, size)):
            local: Tensor | None = None  # output of the previous stage if that stage is on this rank
            for stage in self.stages:
                if stage.is_first:
                    local = inputs[rows]
                elif not self._is_here(stage.stage_index - 1):
                    local = torch.empty_like(_hidden(self._config, self._plan), device=inputs.device)
                    dist.recv(local, group=stage.group, group_src=self._rank_of(stage.stage_index - 1))
                out: Tensor = stage.submod(local)
                if stage.is_last:
                    losses.append(self._loss(out, targets[rows]))
                elif self._is_here(stage.stage_index + 1):
                    local = out
                else:
                    dist.send(out.contiguous(), group=stage.group, group_dst=self._rank_of(stage.stage_index + 1))
        return torch.stack(losses).mean() if losses else torch.zeros((), device=inputs.device)

    def _rank_of(self, stage: int) -> int:
        """Pipeline rank that runs `stage`."""
        return next(rank for rank, stages in enumerate(self._plan.stages.of_rank) if stage in stages)

    def _is_here(self, stage: int) -> bool:
        return stage in (own.stage_index for own in self.stages)


def _tokens(config: Config, plan: Plan) -> Tensor:
    return torch.empty(plan.micro_batch_size, config.data.seq_len // plan.cp, dtype=torch.long, device="meta")


def _hidden(config: Config, plan: Plan) -> Tensor:
    seq = config.data.seq_len // plan.cp // (plan.tp if config.parallel.sequence_parallel else 1)
    shape = (plan.micro_batch_size, seq, config.model.dim)
    return torch.empty(shape, dtype=COMPUTE_DTYPES[config.train.precision], device="meta", requires_grad=True)


def _logits(config: Config, plan: Plan) -> Tensor:
    shape = (plan.micro_batch_size, config.data.seq_len // plan.cp, config.model.vocab_size)
    return torch.empty(shape, dtype=COMPUTE_DTYPES[config.train.precision], device="meta", requires_grad=True)
