"""Attach the probes to a training that has been built.

install(recorder)                       # collectives: before any process group is made
training = build(config, plan, device, recorder=recorder)
gradients = instrument(training, recorder)
record_compilation(recorder)            # after everything that compiles has been built
experts = watch_experts(training, recorder)
"""

from __future__ import annotations

from probes.compilation import CompileProbe
from probes.expert_load import ExpertProbe
from probes.fail_open import failing_open
from probes.gradients import GradientProbe
from probes.pipeline import record_schedule
from probes.recorder import Recorder
from probes.tape_recorder import TapeRecorder
from trainer.training.rank_training import Training

__all__ = ["instrument", "record_compilation", "watch_experts"]


def record_compilation(recorder: Recorder) -> None:
    """Record what torch compiles, until the recorder closes."""
    if isinstance(recorder, TapeRecorder):
        probe = CompileProbe(recorder)
        probe.hook()  # the compiler is imported by now: the optimizer imports it even without `torch.compile`
        recorder.at_close.append(probe.remove)


def watch_experts(training: Training, recorder: Recorder) -> ExpertProbe | None:
    """Return the probe of the rank's mixture-of-experts layers; None without such layers, or if nothing is recorded."""
    if not recorder.enabled or not training.expert_layers:
        return None
    probe = None
    with failing_open("experts"):
        layers = {number: layer.take_load for number, layer in training.expert_layers.items()}
        probe = ExpertProbe(recorder, layers, interval=training.config.probes.expert_interval)
    return probe


def instrument(training: Training, recorder: Recorder) -> GradientProbe | None:
    """Record this rank's pipeline stages. Returns the probe of the rank's gradients; None if nothing is recorded."""
    if not recorder.enabled:
        return None
    if training.pipeline is not None:
        record_schedule(recorder, training.pipeline.schedule, training.pipeline.stages)
    probe = None
    with failing_open("gradients"):
        interval = training.config.probes.gradient_interval
        probe = GradientProbe(recorder, training.named_parameters(), interval=interval)
    return probe
