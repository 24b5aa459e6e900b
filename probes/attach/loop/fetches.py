"""Record fetches from torch's data loaders as phase `data`, and begin the step for which a batch is fetched.

    fetches = Fetches(phases, updates, losses)
    fetches.patch()
    ...
    fetches.model_called(trains=True)    # at every pass of the model: shows what its batches were fetched for

A step begins with the fetch of its first batch, even if that fetch raises or never ends, but not if it finds the end of
the epoch. Batches of an evaluation begin no step: an evaluation after an update belongs to that update's step. A loader
feeds an evaluation if its iterator has not fed training, and one of two conditions holds. Either gradients are off, or
the loader's data set has not fed training and all models (of a wrapper, its main part) are in eval mode. This is known
before the model is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn

from ...fail_open import record_error
from ...recorder import Recorder
from ...torch_compat import BASE_LOADER_ITERATOR
from .evaluations import inner_modules, main_parts
from .step_losses import StepLosses
from .updates import Updates

__all__ = ["Fetches"]

_DATA = "data"
_monotonic_ns = time.monotonic_ns


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    recorder: Recorder
    in_eval_mode: Container[nn.Module]

    @property
    def next_step(self) -> int: ...

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def models(self) -> list[nn.Module]: ...

    def is_in(self, kind: str) -> bool: ...

    def enter(self, kind: str) -> None: ...

    def leave(self, kind: str) -> None: ...

    def begin(self, start_ns: int = 0) -> None: ...


class Fetches:
    """Data loaders of the loop's thread."""

    def __init__(self, phases: _Phases, updates: Updates, losses: StepLosses) -> None:
        self._phases = phases
        self._updates = updates
        self._losses = losses
        self._training_iterators: WeakSet[Any] = WeakSet()  # iterators that have fed training
        self._training_sets: set[int] = set()  # the data sets of these loaders: a data set outlives an epoch
        self._unknown: WeakSet[Any] = WeakSet()  # iterators used since the last call of a model

    def patch(self) -> None:
        """Observe torch's data loaders, and loaders built on them."""
        self._phases.replace(BASE_LOADER_ITERATOR, "__next__", self._fetch)

    def model_called(self, *, trains: bool) -> None:
        """Note a call of a model, in training or not, with the batches fetched since the last call."""
        if trains and self._updates.remainder.is_cleared():
            self._losses.forget()
        if not self._unknown:
            return
        if trains:
            self._training_iterators |= self._unknown
            self._training_sets.update(id(getattr(iterator, "_dataset", None)) for iterator in self._unknown)
        self._unknown = WeakSet()

    def _evaluates(self, iterator: Any) -> bool:
        if iterator in self._training_iterators:
            return False
        self._unknown.add(iterator)
        if not torch.is_grad_enabled():
            return True
        models = [model for model in self._phases.models() if model not in self._phases.in_eval_mode]
        modes = [all(part.training for part in main_parts(inner_modules(model)[-1])) for model in models]
        return id(getattr(iterator, "_dataset", None)) not in self._training_sets and bool(modes) and not any(modes)

    def _fetch(self, real: Callable[..., Any], iterator: Any) -> Any:
        phases, recorder = self._phases, self._phases.recorder
        if phases.is_in(_DATA):
            return real(iterator)
        before, start_ns, begins, trains = recorder.step_number, _monotonic_ns(), False, False
        try:
            may_begin = phases.next_step != before
            trains = not (may_begin and self._evaluates(iterator))
            begins = may_begin and trains
            if begins:
                recorder.step_number = phases.next_step  # so that a fetch that never ends is recorded in the next step
            phases.enter(_DATA)
        except Exception as error:
            record_error("attach.data", error)
        try:
            batch = real(iterator)
        except StopIteration:
            self._updates.remainder.epoch_ended()
            begins = trains = False
            raise
        finally:
            try:
                recorder.step_number = before
                if trains:
                    self._updates.fetched(begins_step=begins)
                if begins:
                    phases.begin(start_ns)
                phases.leave(_DATA)
            except Exception as error:
                record_error("attach.data", error)
        return batch
