"""Pipeline parallelism with `torch.distributed.pipelining`: this rank's stages and the schedule that runs them.

    pipeline = Pipeline(parts, config, plan, mesh, device, loss)
    losses = pipeline.run(batch.inputs, batch.targets)      # forward and backward of all microbatches

The shape of what travels between stages is known beforehand and given to torch; else it would run a forward and
backward of its own on the first batch to find out, with gradients and collectives that nobody asked for.
`stages` and `schedule` are torch's own objects: probes hook `forward_one_chunk` and its companions there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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

from trainer.config import Config
from trainer.mesh_plan import Plan
from trainer.model.transformer import Transformer
from trainer.parallel.mesh import submesh
from trainer.parallel.parallelize import ParallelModel, activation_dtype

__all__ = ["Pipeline", "stage_modules"]

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}


def stage_modules(config: Config, plan: Plan, pp_rank: int) -> list[Transformer]:
    """The rank's parts of the model, one a stage; the whole model where there is no pipeline."""
    last = plan.stages.count - 1
    return [
        Transformer(config.model, plan.stages.layers[number], first=number == 0, last=number == last)
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
        self.holds_first = parts[0].module.embed is not None
        self.holds_last = parts[-1].module.head is not None
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
        # The loss divides by the number of microbatches itself, so torch must not divide the gradients again.
        self.schedule = _SCHEDULES[config.parallel.schedule](
            self.stages[0] if single else self.stages,
            count,
            loss_fn=lambda logits, targets: loss(logits, targets) / count,
            scale_grads=False,
        )

    def run(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Accumulate gradients over all microbatches; the mean loss on the rank with the last stage, else zero."""
        return self._call(self.schedule.step, inputs, targets)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward only; returns as `run`."""
        return self._call(self.schedule.eval, inputs, targets)

    def _call(self, function: Callable[..., Any], inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        function(
            *((inputs,) if self.holds_first else ()),
            target=targets if self.holds_last else None,
            losses=losses if self.holds_last else None,
            return_outputs=False,
        )
        if not losses:
            return torch.zeros((), device=inputs.device)
        return torch.stack([loss.detach() for loss in losses]).sum()


def _tokens(config: Config, plan: Plan) -> Tensor:
    return torch.empty(plan.micro_batch_size, config.data.seq_len, dtype=torch.long, device="meta")


def _hidden(config: Config, plan: Plan) -> Tensor:
    seq = config.data.seq_len // (plan.tp if config.parallel.sequence_parallel else 1)
    shape = (plan.micro_batch_size, seq, config.model.dim)
    dtype = activation_dtype(config, plan)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def _logits(config: Config, plan: Plan) -> Tensor:
    shape = (plan.micro_batch_size, config.data.seq_len, config.model.vocab_size)
    return torch.empty(shape, dtype=activation_dtype(config, plan), device="meta", requires_grad=True)
