"""Decide which update ends a step of a loop with one optimizer, several optimizers with a loss each, or no optimizer.

    updates.backward_ended(models)                      # models whose optimizer is unknown
    leader = updates.step_begins(optimizer, leader)     # the optimizer whose step ends the loop's step
    updates.enter_step(optimizer, is_inside=False)      # False if it steps inside another optimizer's step
    updates.was_by_hand(model)      # True if `model` was updated, or lost its gradients, without an optimizer

Models that are trained in turn against separate losses (GANs, actors and critics) have no loss whose size measures
progress. An event records this (`analyzers.numerics.policy_loss`). A loop without a torch optimizer, which subtracts
gradients itself or has its own class (Keras), ends its steps where its parameters have changed. A change through
`parameter.data` cannot be detected: there the step ends where gradients are cleared or zeroed.

The *leader* is the optimizer whose step ends the loop's step. A sweep or cross-validation trains several times in a
process, each time with a new optimizer. Another optimizer becomes the leader

1. at its first update, if it shares a parameter with the leader, if the newest `TAKES_OVER` updates are all the
   leader's, or if the leader and all others that stepped have been deleted (in federated learning each client has a
   copy of the model and a new optimizer);
2. at a later update, if this optimizer and the leader have each made `TAKES_OVER` updates in a row (a fold of a
   cross-validation in its second epoch);
3. otherwise, once it has made `TAKES_OVER` updates since the leader's last one.

If the former leader steps before the new leader has made `TAKES_OVER` updates in a row, the former leader leads again:
a discriminator may join its generator late. If the old and the new leader share no parameter, another model is trained.
An event records this, because the losses of the two models are not one series. Optimizers that step after the same
backward pass are *partners* (Muon for matrices, AdamW for the rest): they train one model, and the first to step after
a pass leads.

In the first iteration it is unknown which optimizers will step. If the first step begins with the fetch of a batch, and
an optimizer of other parameters exists, the step lasts until the next fetch. The last optimizer to step after a
separate backward pass then leads: a generator's and its discriminator's update are one iteration.

The leader's update may not be the last of its batch: a discriminator joined late, or the first batch had more updates
than most (a regularisation at every sixteenth). So, where models are trained in turn and the leader makes one update
for most batches, its step lasts until the next fetch too.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...device.capture import is_capturing
from ...recorder import Recorder
from ...step_scalars import read_back
from ...tape import event_kinds
from ...tape_recorder import TapeRecorder
from .remainder import Remainder
from .weak_objects import DeletedOptimizer, WeakObjects, WeakReference

__all__ = ["Leaves", "Updates", "named_parameters_in", "named_parameters_of", "parameters_of", "unwrapped"]

TURNS = 3
"""Minimum alternations between two optimizers, each with its own backward pass, to count as trained in turn."""
TAKES_OVER = 8
"""An optimizer becomes the leader after this many updates without an update by the leader. A new optimizer becomes the
leader at once if the leader made the last updates, at least this many, alone. A critic makes about five per generator
update."""
MAX_NODES = 5000
"""Maximum number of nodes of the autograd graph that are searched."""


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

    _last = WeakReference(keeps_parameters=False)  # the newest optimizer to step after a backward pass
    _leader = WeakReference()  # the newest optimizer to step as the leader

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._after_backward = False
        self.remainder = Remainder()
        self._seen = WeakObjects()  # optimizers that have stepped after a backward pass
        self._turns = 0
        self._first_is_recorded = False
        self._before: tuple[Tensor, Any] | None = None  # number of earlier updates, while it is copied from a device
        self._with_gradients: dict[int, _State] = {}  # id of a model -> its state right after its backward pass
        self.are_by_hand: bool | None = None  # True if the loop updates without an optimizer; None: not yet known
        self._without_leader: Counter[int] = Counter()  # optimizer's id -> updates since the leader's last one
        self._counted = WeakObjects()
        self._outer: Any = None  # the optimizer in whose step others may step
        self._num_alone = 0  # number of the leader's updates since the last update by another optimizer
        self._alone = WeakObjects()  # leaders that made `TAKES_OVER` updates with no other between them
        self._leaves = Leaves()
        self._former = WeakObjects()  # the previous leader, as long as it may lead again
        self._is_fetched = False  # the first step begins with the fetch of a batch
        self._awaits_others = False  # until the next fetch, another optimizer may become the leader
        self._num_in_batch = 0  # number of the leader's updates since the newest fetch
        self._by_batch: deque[int] = deque(maxlen=TURNS)  # the same, for the newest batches with such an update
        self._partners = WeakObjects()  # optimizers that step after the same backward passes as the leader
        self._began_at: int | None = (
            None  # first step of another model's training, unless the former leader turns out to be a partner
        )
        if isinstance(recorder, TapeRecorder):
            recorder.at_close.append(self._record_training)
        self.at_training: list[Callable[[Any], None]] = []
        """Called with the optimizer when another model is trained with it."""

    def backward_ended(self, models: Iterable[nn.Module] = (), root: Any = None) -> None:
        """Note the end of a backward pass from `root`. `models`: the trained models, needed if no optimizer of them is
        known."""
        self._after_backward = True
        self.remainder.backward_ended(self._leader)
        self._leaves.find(None if models or self._leader is not None else root)
        for model in models or self.trained_leaves:
            if _has_gradient(model):
                self._with_gradients[id(model)] = _state(model)

    @property
    def trained_leaves(self) -> Sequence[Leaves]:
        """The tensors that are trained, if no model and no optimizer is known."""
        return [self._leaves] if self._leader is None else []

    def step_begins(self, optimizer: Any, leader: Any) -> Any:
        """Handle the start of an optimizer's step, and return the leader. All optimizers that step before the next
        backward pass update for the same loss.
        """
        self.remainder.updated()
        if self._before is not None and self._before[1].query():
            self._record_first(int(self._before[0].item()))
        if self._counted.add(optimizer):
            self._without_leader.pop(id(optimizer), None)  # drop the count of a deleted optimizer with the same id
        self._without_leader[id(optimizer)] += 1
        replaces, after_backward = False, self._after_backward
        follows_one = optimizer is leader and self._without_leader[id(self._last)] == 1
        if after_backward:
            self._after_backward = False
            self._record_training()
            self._with_gradients.clear()
            is_new = self._seen.add(optimizer)
            # Of partners, the first to step after a backward pass leads.
            if optimizer is not leader and self.are_partners(optimizer, leader):
                self._last = self._leader = leader = optimizer
            # Optimizers that take turns, each after a backward pass for it, train a GAN, or an actor and a critic.
            if not is_new and self._last is not optimizer:
                self._turns += 1
                if self._turns == TURNS:
                    self._recorder.event(event_kinds.TRAINED_IN_TURN)
            self._last = optimizer
            returns = optimizer in self._alone and self._num_alone >= TAKES_OVER  # case 2
            succeeds = returns or (is_new and self._is_successor(optimizer, leader))  # case 1
            replaces = leader is None or succeeds or optimizer in self._former
        # No backward pass came since the last optimizer's step, so this optimizer updates for the same loss. But if the
        # last one has stepped several times, the leader takes the sum of its updates (DiLoCo).
        elif leader is not None and optimizer is not self._last and (leader is self._last or follows_one):
            self._partners = self._partners if leader in self._partners else WeakObjects([leader])
            self._partners.add(self._last if optimizer is leader else optimizer)
            if optimizer in self._former:
                self._began_at = None
        # In the first iteration, the last optimizer to step after a separate backward pass leads.
        if self._awaits_others and optimizer is not leader and after_backward:
            self._leader = optimizer
            return optimizer
        if optimizer is leader and after_backward:
            self._awaits_others = False
        if optimizer is not leader and not replaces and self._without_leader[id(optimizer)] < TAKES_OVER:  # not case 3
            if after_backward:
                self._num_alone = 0
            return leader
        if optimizer is not leader:
            self._former, self._num_alone = WeakObjects([] if optimizer in self._former else [leader]), 0
        elif self._num_alone == TAKES_OVER:
            self._former = WeakObjects()
        self._num_alone += 1
        if self._num_alone == TAKES_OVER:
            self._alone.add(optimizer)
        self._without_leader.clear()
        if self._last is not None:  # a step before any backward pass only allocates the optimizer's state
            self._set_leader(optimizer)
        return optimizer

    @property
    def awaits_others(self) -> bool:
        """True if the step goes on after the leader's update, until the fetch of a batch."""
        is_trained_in_turn = self._turns >= TURNS and 1 in self._by_batch
        return self._awaits_others or (is_trained_in_turn and 0 < self._num_in_batch < TAKES_OVER)

    def fetched(self, *, begins_step: bool) -> None:
        """Note the fetch of a batch."""
        if begins_step:
            self._is_fetched, self._awaits_others = not self._first_is_recorded, False
        if self._num_in_batch:
            self._by_batch.append(self._num_in_batch)
        self._num_in_batch = 0

    def made(self) -> bool:
        """Note that the leader's update was made. Returns True if its step goes on."""
        self._num_in_batch += 1
        return self.awaits_others

    def _is_successor(self, optimizer: Any, leader: Any) -> bool:
        """Return True if a new optimizer leads from its first update."""
        is_only_one_left = isinstance(leader, DeletedOptimizer) and len(list(self._counted)) == 1
        return (
            is_only_one_left or self._num_alone >= TAKES_OVER or bool(parameters_of(optimizer) & parameters_of(leader))
        )

    def _set_leader(self, optimizer: Any) -> None:
        """Make the optimizer the leader; call `at_training` if it trains another model than the previous leader."""
        before = self._leader
        if before is optimizer:
            return
        self._leader = optimizer
        if before is None:
            self.first_update_begins(optimizer)
            self._awaits_others = self._is_fetched and _has_others(optimizer)
            return
        old, new = parameters_of(before), parameters_of(optimizer)
        if new and not old & new and (old or (isinstance(before, DeletedOptimizer) and before.is_empty)):
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

    def first_update_begins(self, optimizer: Any = None) -> None:
        """Record that the loop's first update begins, once."""
        if not self._first_is_recorded:
            self._first_is_recorded = True
            count = _updates_before(optimizer)
            if isinstance(count, Tensor):  # on the device (fused optimizer): recorded after an asynchronous copy
                self._before = read_back(count)
            else:
                self._record_first(count)

    def _record_first(self, num_before: int | None) -> None:
        self._before = None
        self._recorder.event(event_kinds.FIRST_UPDATE, num_before=num_before)

    def enter_step(self, optimizer: Any, *, is_inside: bool) -> bool:
        """Return False if the step that begins is part of another optimizer's: ZeroRedundancyOptimizer, sharpness-aware
        minimization and the like step an inner optimizer. `is_inside`: some optimizer's step is not over.
        """
        if is_inside and self._outer is not None and self._outer is not optimizer:
            return False
        self._outer = optimizer
        return True

    def leave_step(self, optimizer: Any) -> bool:
        """Return True if the step that is over is not part of another optimizer's."""
        if self._outer is not optimizer:
            return False
        self._outer = None
        return True

    def was_by_hand(self, model: nn.Module | Leaves) -> bool:
        """Return True if the model was updated by hand: its parameters or gradients were written to, or its gradients
        cleared, since its backward pass. False if an optimizer has stepped or holds the parameters, because
        sharpness-aware minimization changes parameters and gradients before the optimizer's step.
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
            self.first_update_begins()
        return self.are_by_hand


def _updates_before(optimizer: Any) -> int | Tensor | None:
    """Number of updates in a loaded optimizer state. It is a tensor if it is on a device, and None if it cannot be
    read."""
    state = getattr(optimizer, "state", None) if isinstance(optimizer, Optimizer) else None
    states = state.values() if isinstance(state, Mapping) else ()
    count = next((one["step"] for one in states if isinstance(one, Mapping) and "step" in one), None)
    if not isinstance(count, Tensor):
        return None if count is None else int(count)
    if count.numel() != 1 or is_capturing():  # in a capture a copy would become a part of the graph
        return None
    return int(count) if count.is_cpu else count


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that steps; wrappers, such as Accelerate's, hold it as `optimizer`."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _has_gradient(model: nn.Module | Leaves) -> bool:
    return any(_gradient(parameter) is not None for parameter in model.parameters())


def _gradient(parameter: Tensor) -> Tensor | None:
    """None during `torch.func.functional_call`, in which other values stand in for the parameters: torch would warn."""
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
    parameters = parameters_of(optimizer)
    found = (parameters_of(one) for one in gc.get_objects() if issubclass(type(one), Optimizer))
    return any(others and not others & parameters for others in found)


def parameters_of(optimizer: Any) -> set[int]:
    """Ids of the parameters that an optimizer updates; empty if it has no `param_groups`."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(parameter) for group in groups for parameter in group.get("params", ())}


def named_parameters_in(models: Iterable[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Parameters of models, each once: models may share weights, and one may be a part of another. Tensors computed
    from parameters (a copy of a model in meta-learning) are left out: a reference would keep their graph in memory.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.is_leaf:
                found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def named_parameters_of(optimizer: Any) -> list[tuple[str, Any]]:
    """Tensors that an optimizer updates, named by their positions in its parameter groups."""
    groups = getattr(optimizer, "param_groups", ())
    lists = [list(group.get("params", ())) for group in groups]
    return [(f"param_groups.{i}.{j}", one) for i, params in enumerate(lists) for j, one in enumerate(params)]
