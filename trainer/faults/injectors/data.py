"""Faults of the data: batches are late, end early or are corrupted, or a loader process is killed.

ARM["bad_batch"](trigger, training)
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from probes.recorder import Recorder
from trainer.data.batches import Batch
from trainer.faults.options import Fault, FaultError
from trainer.faults.trigger import FaultyLoader, Trigger
from trainer.training.rank_training import Training

__all__ = ["ARM"]


def _arm_slow_data(trigger: Trigger, training: Training) -> None:
    fault, clock = trigger.fault, _StepClock()

    class Slow(FaultyLoader):
        def before(self) -> None:
            own_s = clock.own_s(trigger.recorder)
            if trigger.lasting():
                time.sleep(fault.seconds or (fault.factor or 2.0) * own_s - own_s)
                clock.pause(trigger.recorder)

    Slow(training)


class _StepClock:
    """Measures a rank's own work between two calls, in seconds, without waits for other ranks and without the fault's
    delay."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def own_s(self, recorder: Recorder) -> float:
        now, waited = time.monotonic_ns(), recorder.wait_ns
        before, self._last = self._last, (now, waited)
        return 0.0 if before is None else max(0, now - before[0] - (waited - before[1])) / 1e9

    def pause(self, recorder: Recorder) -> None:
        self._last = (time.monotonic_ns(), recorder.wait_ns)


def _arm_data_ends(trigger: Trigger, training: Training) -> None:
    class Ending(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                raise StopIteration(f"injected fault: no data at step {trigger.fault.step} on rank {trigger.rank}")

    Ending(training)


def _arm_loader_killed(trigger: Trigger, training: Training) -> None:
    if not training.config.data.num_workers:
        raise FaultError("--fault loader_killed: data.num_workers = 0: there is no worker process; must be 1 or more")
    prefetcher: Any = training.loader

    class Orphaning(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                while isinstance(loader := prefetcher, FaultyLoader):  # loaders of other faults may wrap it
                    loader = loader.inner
                os.kill(loader._running._workers[0].pid, signal.SIGKILL)

    Orphaning(training)


def _arm_bad_batch(trigger: Trigger, training: Training) -> None:
    is_bad = _Batches(trigger)

    class Bad(FaultyLoader):
        def change(self, batch: Batch) -> Batch:
            if not is_bad(batch.index):
                return batch
            generator = torch.Generator().manual_seed(batch.index * 1_000_003 + training.data_rank)
            shape, size = batch.inputs.shape, training.config.model.vocab_size
            tokens = torch.randint(size, (shape[0], shape[1] + 1), generator=generator)
            return Batch(
                index=batch.index,
                inputs=tokens[:, :-1].contiguous(),
                targets=tokens[:, 1:].contiguous(),
                sample_ids=batch.sample_ids,
            )

    Bad(training)


def _arm_failing(trigger: Trigger, training: Training) -> None:
    """Simulate data that causes a NaN loss (e.g. an empty target). The loss is changed because tokens cannot be NaN."""
    is_bad, now = _Batches(trigger), [False]

    class Failing(FaultyLoader):
        def change(self, batch: Batch) -> Batch:
            now[0] = is_bad(batch.index)
            return batch

    def after_forward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output * float("nan") if module.training and now[0] else None

    Failing(training)
    for part in training.modules:
        if part.head is not None:
            part.head.register_forward_hook(after_forward)
            part.register_forward_hook(after_forward)  # the chunked loss does not call the head


class _Batches:
    """Decides by index which batches are struck, so that these are the same in every attempt and replay. Reports the
    first of them."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger
        self.reported = False

    def __call__(self, batch_index: int) -> bool:
        fault: Fault = self.trigger.fault
        lasts = fault.kind == "failing_data"
        struck = batch_index >= fault.batch_index if lasts else batch_index == fault.batch_index
        if struck and not self.reported:
            self.reported = True
            self.trigger.report()
        return struck


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    "slow_data": _arm_slow_data,
    "data_ends": _arm_data_ends,
    "loader_killed": _arm_loader_killed,
    "bad_batch": _arm_bad_batch,
    "failing_batch": _arm_failing,
    "failing_data": _arm_failing,
}
