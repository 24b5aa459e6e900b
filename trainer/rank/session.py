"""Make the session of a rank's loop from a built training: guard, checks and recording.

gradients = instrument(training, recorder)
session = make_session(training, recorder, run, gradients)
train(session)
"""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.parallel import DistributedDataParallel

from probes.collectives.gradients.reduction_inputs import watch_first_layer, watch_fsdp_reductions
from probes.collectives.wrapped import unreduced_gradients
from probes.gradients import GradientProbe
from probes.recorder import Recorder
from probes.tape.rundir import RunDir
from trainer.config.config import Config
from trainer.guard.recovery import Recovery
from trainer.layout.plan import Plan
from trainer.parallel.ddp import watch_buckets
from trainer.rank.instrument import watch_experts
from trainer.rank.late_verdict import late_verdict
from trainer.rank.loop import Session
from trainer.training.rank_training import Training

__all__ = ["make_session"]


def make_session(
    training: Training,
    recorder: Recorder,
    run: RunDir,
    gradients: GradientProbe | None,
    *,
    asked_to_stop: Callable[[], bool] = lambda: False,
    prints_progress: bool = False,
) -> Session:
    """Make the session. Collective. Faults that wrap a part of `training` must be armed earlier."""
    config, plan, inputs = training.config, training.plan, None
    probes = config.probes
    if recorder.enabled and probes.collectives and probes.nonfinite_flags and training.device.type != "cpu":
        # On the host, the process-group wrapper already checks each input.
        if plan.dp_shard > 1:
            inputs = watch_fsdp_reductions()
        elif isinstance(ddp := training.parts[0].forward_module, DistributedDataParallel) and (
            config.parallel.gradient_compression == "none"
        ):
            inputs = watch_buckets(ddp)
        elif plan.world_size > 1:
            inputs = watch_first_layer(training.modules[0])
    recovery = Recovery(training, recorder, run, gradients, inputs)
    return Session(
        training=training,
        recorder=recorder,
        recovery=recovery,
        gradients=gradients,
        unreduced=unreduced_gradients() if _reduces_whole_gradients(config, plan) else None,
        reduction_inputs=inputs,
        experts=watch_experts(training, recorder),
        late=late_verdict(training, recorder, recovery),
        asked_to_stop=asked_to_stop,
        prints_progress=prints_progress,
    )


def _reduces_whole_gradients(config: Config, plan: Plan) -> bool:
    """Return True if a rank reduces each of its gradients whole, exactly once per step, and nothing else."""
    is_only_reduction = plan.tp == plan.ep == plan.cp == 1 and config.parallel.gradient_compression == "none"
    by_microbatch = config.parallel.reduce_every_microbatch and plan.num_microbatches > 1
    return plan.data_size > 1 and is_only_reduction and not by_microbatch
