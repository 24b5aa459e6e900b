"""Probes on a training that has been built.

install(recorder)                       # collectives: before any process group is made
training = build(config, plan, device, recorder=recorder)
gradients = instrument(training, recorder)
"""

from __future__ import annotations

from probes.failopen import failing_open
from probes.gradients import GradientProbe
from probes.pipeline import record_schedule
from probes.recorder import Recorder
from trainer.training import Training

__all__ = ["instrument"]


def instrument(training: Training, recorder: Recorder) -> GradientProbe | None:
    """Record the stages of this rank's pipeline; returns the probe of its gradients, None if nothing is recorded."""
    if not recorder.enabled:
        return None
    if training.pipeline is not None:
        record_schedule(recorder, training.pipeline.schedule, training.pipeline.stages)
    with failing_open("gradients"):
        interval = training.config.probes.gradient_interval
        return GradientProbe(recorder, training.named_parameters(), interval=interval)
    return None
