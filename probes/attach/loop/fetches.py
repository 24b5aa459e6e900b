"""Record fetches from torch's data loaders as phase `data`, and begin the step for which a batch is fetched.

    fetches = Fetches(phases, updates, losses)
    fetches.patch()
    ...
    fetches.model_called(trains=True)    # at every pass of the model: shows what its batches were fetched for

A step begins with the fetch of its first batch, even if that fetch raises or never ends, but not if it finds the end of
the epoch. Batches of an evaluation begin no step: an evaluation after an update belongs to that update's step. A loader
feeds an evaluation if its iterator has not fed training, and one of two conditions holds. Either gradients are off, or
the loader's data set has not fed training and all models (of a wrapper, its main part) are in eval mode. This is known
before the model is called. Whether the loop has dropped the gradients of its newest passes is seen here, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...fail_open import record_error
from ...recorder import Recorder
from ...torch_compat import BASE_LOADER_ITERATOR
from .evaluations import inner_modules, main_parts
from .step_losses import StepLosses
from .step_norms import StepNorms
from .updates import Updates

__all__ = ["Fetches"]

_DATA = "data"
_monotonic_ns = time.monotonic_ns


class _Phases(Protocol):
    """Phases of a loop, as `loop_hooks.LoopPhases` records them."""

    recorder: Recorder
    norms: StepNorms
    in_eval_mode: Container[nn.Module]

    @property
    def next_step(self) -> int: ...

    def replace(self, place: Any, name: str, wrapper: Callable[..., Any]) -> None: ...

    def models(self) -> list[nn.Module]: ...

    def is_in(self, kind: str) -> bool: ...

    def enter(self, kind: str) -> None: ...

    def leave(self, kind: str) -> None: ...

    def begin(self, start_ns: int = 0) -> None: ...

    def refused(self, *, are_gone: bool = ...) -> None: ...


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
        if trains:
            self._look_for_dropped()
        if not self._unknown:
            return
        if trains:
            self._training_iterators |= self._unknown
            self._training_sets.update(id(getattr(iterator, "_dataset", None)) for iterator in self._unknown)
        self._unknown = WeakSet()

    def _look_for_dropped(self) -> None:
        """End the step if the loop has cleared its NaN or Inf gradients; leave out losses that an epoch has left."""
        phases, remainder = self._phases, self._updates.remainder
        if phases.next_step != phases.recorder.step_number:  # the step is over
            return
        norms, is_left, has_same_weights = phases.norms, remainder.is_left, remainder.has_same_weights
        is_bad = norms.is_bad and (norms.is_global or _is_same_on_all_ranks(phases.models()))
        # All ranks must agree on the end of a step. Where a rank knows only the norm of its shards, it refuses the
        # gradients by which it has clipped, if they are cleared: all ranks clear them.
        is_refused = is_bad or (norms.is_of_shards and has_same_weights)
        if (is_refused or is_left or has_same_weights) and remainder.is_cleared():
            if is_refused:
                phases.refused(are_gone=True)
            elif is_left:
                self._losses.forget()
            else:
                self._losses.cleared()

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
            self._look_for_dropped()
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


def _is_same_on_all_ranks(models: Iterable[nn.Module]) -> bool:
    """Return True if all ranks have the same gradients. Where each holds a part of the model, the norm of one part does
    not show that all ranks drop the step, and their steps would be numbered differently."""
    is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    return is_alone or any(isinstance(one, DistributedDataParallel) for model in models for one in inner_modules(model))
