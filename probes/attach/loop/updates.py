"""Count the updates in a step of a loop: by one optimizer, by several with a loss each, or by hand.

    updates.passed(models)               # after a backward pass; models whose optimizer is unknown
    leader = updates.begins(optimizer, leader)    # an optimizer steps; returns the one whose step ends the loop's
    updates.enters(optimizer, is_inside=False)    # False if it steps inside of another's step
    updates.was_by_hand(model)           # True if `model` was updated, or lost its gradients, without an optimizer

Models that are trained in turn against separate losses (GANs, actors and critics) have no loss whose size
measures progress; an event records this (`analyzers.numerics.policy_loss`). A loop without a torch optimizer, which
subtracts gradients itself or has its own class (Keras), ends its steps where its parameters have changed. A change
through `parameter.data` cannot be detected: there the step ends where gradients are cleared or zeroed.

The *leader* is the optimizer whose step ends the loop's. A process may train several times, as in a sweep or
cross-validation, each time with a new optimizer. The new one leads from its first update if it shares a parameter with
the leader, if the leader has made `TAKES_OVER` updates with no other between them, or if the leader and all others that
stepped have been deleted (each client of federated learning has a copy of the model and a new optimizer), else after
`TAKES_OVER` updates without one by the leader. An optimizer that has made as many alone before (a fold of a cross-
validation in its second epoch) leads again from its first update, if the leader has, too. Should the former leader step
again within as many updates, it leads on: a discriminator may join its generator late. If the two share no parameter,
another model is trained; an event records this, because the losses before and after it are not one series. Optimizers
that have stepped after one backward pass are *partners* (Muon for matrices, AdamW for the others): they train one
model, and the first of them to step after a pass leads.

In the first iteration nothing is known of an optimizer that is yet to step. If the first step begins with the fetch of
a batch and such an optimizer exists, the step lasts until the next fetch, and the last one to step after a separate
backward pass leads: a step of a generator and its discriminator is then one iteration.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...device.capture import is_capturing
from ...recorder import Recorder
from ...step_scalars import read_back
from ...tape import event_kinds
from ...tape_recorder import TapeRecorder
from .living import Living, Remembered, Remnant

__all__ = ["Leaves", "Updates", "named_parameters_in", "named_parameters_of", "parameters_of", "unwrapped"]

TURNS = 3
"""Minimum alternations between two optimizers, each with its own backward pass, to count as trained in turn."""
TAKES_OVER = 8
"""Updates of one optimizer without one of the leader, after which it leads, and updates of the leader alone, after
which a new optimizer leads at once. A critic has some five for one of its generator."""
MAX_NODES = 5000
"""Nodes of the graph that are looked at."""


_State = tuple[list[int], int]


class Leaves:
    """The tensors that the newest backward pass gave gradients, for loops without a module (`a -= rate * a.grad`)."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the tensors."""
        return iter(self._tensors)

    def find(self, root: Any) -> None:
        """Find them in the graph of `root`."""
        nodes = [getattr(root, "grad_fn", None)]
        seen = set(nodes)
        for node in nodes:
            if node is not None and len(nodes) < MAX_NODES:
                inputs = {one for one, _ in node.next_functions} - seen
                seen |= inputs
                nodes.extend(inputs)
        found = [getattr(node, "variable", None) for node in nodes]
        self._tensors = [tensor for tensor in found if isinstance(tensor, Tensor)]


class Updates:
    """The updates of one loop."""

    _last = Remembered(keeps_parameters=False)  # that stepped after a backward pass
    _led = Remembered()  # that last stepped as the leader

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._has_passed = False
        self._seen = Living()  # that have stepped after a backward pass
        self._turns = 0
        self._is_counted = False
        self._before: tuple[Tensor, Any] | None = None  # the count of earlier updates, on its way from a device
        self._with_gradients: dict[int, _State] = {}  # by model, after its backward pass
        self.are_by_hand: bool | None = None  # None: not yet known
        self._without_leader: Counter[int] = Counter()  # by optimizer, since the leader's last update
        self._counted = Living()
        self._outer: Any = None  # the optimizer in whose step others may step
        self._num_alone = 0  # updates of the leader since another's
        self._alone = Living()  # that have made `TAKES_OVER` updates as the leader with no other between them
        self._leaves = Leaves()
        self._former = Living()  # the leader before, while it may lead again
        self._is_fetched = self._awaits = False  # the first step begins with a batch; until the next, others may lead
        self._partners = Living()  # that step after the same backward passes as the leader
        self._began_at: int | None = None  # first step of another training, unless the former leader proves a partner
        if isinstance(recorder, TapeRecorder):
            recorder.at_close.append(self._record_training)
        self.at_training: list[Callable[[Any], None]] = []
        """Called with the optimizer when another model is trained with it."""

    def passed(self, models: Iterable[nn.Module] = (), root: Any = None) -> None:
        """A backward pass from `root` is over; `models` if none of their optimizers is known."""
        self._has_passed = True
        self._leaves.find(None if models or self._led is not None else root)
        for model in models or self.trained_leaves:
            if _has_gradient(model):
                self._with_gradients[id(model)] = _state(model)

    @property
    def trained_leaves(self) -> Sequence[Leaves]:
        """The tensors that are trained, if no model and no optimizer is known."""
        return [self._leaves] if self._led is None else []

    def begins(self, optimizer: Any, leader: Any) -> Any:
        """Handle an optimizer's step; another that steps before the next backward pass updates for the same loss."""
        if self._before is not None and self._before[1].query():
            self._record_first(int(self._before[0].item()))
        if self._counted.add(optimizer):
            self._without_leader.pop(id(optimizer), None)  # of one that no longer exists
        self._without_leader[id(optimizer)] += 1
        replaces, has_pass = False, self._has_passed
        if has_pass:
            self._has_passed = False
            self._record_training()
            self._with_gradients.clear()
            is_new = self._seen.add(optimizer)
            if optimizer is not leader and self.are_partners(optimizer, leader):
                self._last = self._led = leader = optimizer
            if not is_new and self._last is not optimizer:
                self._turns += 1
                if self._turns == TURNS:
                    self._recorder.event(event_kinds.TRAINED_IN_TURN)
            self._last = optimizer
            returns = optimizer in self._alone and self._num_alone >= TAKES_OVER
            succeeds = returns or (is_new and self._is_successor(optimizer, leader))
            replaces = leader is None or succeeds or optimizer in self._former
        elif leader is not None and optimizer is not leader and leader is self._last:
            self._partners = self._partners if leader in self._partners else Living([leader])
            self._partners.add(optimizer)
            if optimizer in self._former:
                self._began_at = None
        if self._awaits and optimizer is not leader and has_pass:
            self._led = optimizer
            return optimizer
        self._awaits = False if optimizer is leader and has_pass else self._awaits
        if optimizer is not leader and not replaces and self._without_leader[id(optimizer)] < TAKES_OVER:
            self._num_alone = 0 if has_pass else self._num_alone
            return leader
        if optimizer is not leader:
            self._former, self._num_alone = Living([] if optimizer in self._former else [leader]), 0
        elif self._num_alone == TAKES_OVER:
            self._former = Living()
        self._num_alone += 1
        if self._num_alone == TAKES_OVER:
            self._alone.add(optimizer)
        self._without_leader.clear()
        if self._last is not None:  # a step before any backward pass only makes the optimizer's state
            self._leads(optimizer)
        return optimizer

    def are_awaited(self, is_fetch: bool) -> bool:
        """Return True if an activity, the fetch of a batch or not, still belongs to the first iteration."""
        if is_fetch:
            self._is_fetched, self._awaits = not self._is_counted, False
        return self._awaits

    def _is_successor(self, optimizer: Any, leader: Any) -> bool:
        """Return True if a new optimizer leads from its first update."""
        is_only_one_left = isinstance(leader, Remnant) and len(list(self._counted)) == 1
        return (
            is_only_one_left or self._num_alone >= TAKES_OVER or bool(parameters_of(optimizer) & parameters_of(leader))
        )

    def _leads(self, optimizer: Any) -> None:
        """The optimizer ends the loop's step."""
        before = self._led
        if before is optimizer:
            return
        self._led = optimizer
        if before is None:
            self.first(optimizer)
            self._awaits = self._is_fetched and _has_others(optimizer)
            return
        old, new = parameters_of(before), parameters_of(optimizer)
        if new and not old & new and (old or (isinstance(before, Remnant) and before.is_empty)):
            self._began_at = self._recorder.step_number
            for begin in self.at_training:
                begin(optimizer)

    def are_partners(self, one: Any, other: Any) -> bool:
        """Return True if two optimizers step after the same backward passes."""
        return one in self._partners and other in self._partners

    def _record_training(self) -> None:
        """Record that another model is trained: the former leader has not stepped after that backward pass."""
        if self._began_at is not None:
            self._recorder.event(event_kinds.TRAINING_BEGAN, step=self._began_at)
            self._began_at = None

    def first(self, optimizer: Any = None) -> None:
        """Record that the loop's first update begins, once."""
        if not self._is_counted:
            self._is_counted = True
            count = _updates_before(optimizer)
            if isinstance(count, Tensor):  # of a fused optimizer: written once it has come back, as nothing may wait
                self._before = read_back(count)
            else:
                self._record_first(count)

    def _record_first(self, num_before: int | None) -> None:
        self._before = None
        self._recorder.event(event_kinds.FIRST_UPDATE, num_before=num_before)

    def enters(self, optimizer: Any, *, is_inside: bool) -> bool:
        """Return False if the step that begins is part of another optimizer's: ZeroRedundancyOptimizer, sharpness-aware
        minimization and the like step an inner optimizer. `is_inside`: some optimizer's step is not over.
        """
        if is_inside and self._outer is not None and self._outer is not optimizer:
            return False
        self._outer = optimizer
        return True

    def leaves(self, optimizer: Any) -> bool:
        """Return True if the step that is over is not part of another optimizer's."""
        if self._outer is not optimizer:
            return False
        self._outer = None
        return True

    def was_by_hand(self, model: nn.Module | Leaves) -> bool:
        """Return True if the model was updated by hand: its parameters or gradients were written to, or its gradients
        cleared, since its backward pass. Not if an optimizer has stepped or holds its parameters: sharpness-aware
        minimization changes both before the optimizer's step.
        """
        if (before := self._with_gradients.get(id(model))) is None:
            return False
        parameters, changes = _state(model)
        if parameters != before[0] or (_has_gradient(model) and changes == before[1]):
            return False  # FSDP2 replaces the parameters while they are gathered
        self._with_gradients.clear()
        if self.are_by_hand is None:
            self.are_by_hand = not _has_optimizer(model)
        if self.are_by_hand:
            self.first()
        return self.are_by_hand


def _updates_before(optimizer: Any) -> int | Tensor | None:
    """Updates that a loaded state counts, a tensor if a device holds it; None without a count that can be read."""
    state = getattr(optimizer, "state", None) if isinstance(optimizer, Optimizer) else None
    states = state.values() if isinstance(state, Mapping) else ()
    count = next((one["step"] for one in states if isinstance(one, Mapping) and "step" in one), None)
    if not isinstance(count, Tensor):
        return None if count is None else int(count)
    if count.numel() != 1 or is_capturing():  # in a capture a copy would become a part of the graph
        return None
    return int(count) if count.is_cpu else count


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that steps: Wrappers of Accelerate and others have it as `optimizer`."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _has_gradient(model: nn.Module | Leaves) -> bool:
    return any(_gradient(parameter) is not None for parameter in model.parameters())


def _gradient(parameter: Tensor) -> Tensor | None:
    """None during `torch.func.functional_call`, whose values stand in for the parameters: torch would warn."""
    return parameter.grad if parameter.is_leaf else None


def _state(model: nn.Module | Leaves) -> _State:
    """Ids of the model's parameters, and the sum of torch's version counters of them and their gradients."""
    parameters = list(model.parameters())
    tensors = [tensor for parameter in parameters for tensor in (parameter, _gradient(parameter)) if tensor is not None]
    return [id(parameter) for parameter in parameters], sum(tensor._version for tensor in tensors)


def _has_optimizer(model: nn.Module | Leaves) -> bool:
    """Search all live objects for an optimizer of this model: slow, so done once."""
    parameters = {id(parameter) for parameter in model.parameters()}
    return any(parameters_of(found) & parameters for found in gc.get_objects() if issubclass(type(found), Optimizer))


def _has_others(optimizer: Any) -> bool:
    """Return True if an optimizer of other parameters exists. Searches all live objects, so done once."""
    own = parameters_of(optimizer)
    found = (parameters_of(one) for one in gc.get_objects() if issubclass(type(one), Optimizer))
    return any(others and not others & own for others in found)


def parameters_of(optimizer: Any) -> set[int]:
    """Ids of the parameters that an optimizer updates; empty if it has no `param_groups`."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group.get("params", ())}


def named_parameters_in(models: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Parameters of models, each once: models may share weights, and one may be a part of another. Not those of a copy
    that are computed from the model's, as in meta-learning: a reference to one would keep its graph in memory.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.is_leaf:
                found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def named_parameters_of(optimizer: Any) -> list[tuple[str, Any]]:
    """Tensors that an optimizer updates, named by their place in it."""
    groups = getattr(optimizer, "param_groups", ())
    lists = [list(group.get("params", ())) for group in groups]
    return [(f"param_groups.{i}.{j}", one) for i, params in enumerate(lists) for j, one in enumerate(params)]
