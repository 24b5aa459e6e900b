"""The guard for an attached loop: verdicts, rollback and skipped batches with three added lines.

    guard = rankscope.guard(lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, load)
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        if guard.refuses(loss):          # NaN, Inf or a jump of the loss: the state is the last good one again
            continue                     # and this batch is not trained on
        optimizer.step()
        optimizer.zero_grad()

All ranks reach the same verdict through one small all-reduce per step, of the mean loss and the gradient norm. Copies
of the state are kept in host memory, except copies of sharded tensors, which stay on the device. A copy is good once
enough healthy steps have followed it. `probes.guard.decisions` limits the number of failures and prevents endless
repetition. After a rollback the loop continues with its next batch, so it has made fewer updates than it has seen
batches. The learning rate is left to the loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attach.attach import current
from ..tape import event_kinds
from ..torch_compat import tree_map
from .decisions import Guard, GuardPolicy, RunStopped, Verdict
from .ledger import Ledger
from .position import Position

__all__ = ["LoopGuard", "RunStopped", "guard"]


@dataclass(slots=True)
class _Copy:
    step: int
    state: Any
    detector: dict[str, Any]
    vetted: bool


class LoopGuard:
    """The guard of an attached loop, made by `guard`. Call every method on all ranks."""

    def __init__(
        self,
        state: Callable[[], Any],
        load: Callable[[Any], object],
        *,
        parameters: Iterable[nn.Parameter],
        interval: int,
        max_rollbacks: int,
        policy: GuardPolicy | None,
    ) -> None:
        self._state = state
        self._load = load
        self._parameters = list(parameters)
        self._interval = interval
        self._guard = Guard(Ledger(), max_rollbacks=max_rollbacks, policy=policy)
        self._copies: list[_Copy] = []
        self._updates = 0  # number of updates in the current state
        self._batches = 0
        self.last: Verdict | None = None
        """The newest unhealthy verdict."""
        self._keep(vetted=True)

    def refuses(self, loss: float | Tensor) -> bool:
        """Return True if the step is refused; the state is then restored and gradients are cleared.

        Call it after the last `backward` of a step and before clipping. `loss` is this rank's own. Raises RunStopped
        when the guard gives up, and ValueError if no parameters are known.
        """
        if not self._parameters:
            self._parameters = _attached_parameters()
        step = self._updates + 1
        verdict = self._guard.judge(step, *self._reduced(loss))
        batch, self._batches = self._batches, self._batches + 1
        if verdict.healthy:
            self._vet(step)
            if self._updates and self._updates % self._interval == 0 and self._copies[-1].step != self._updates:
                self._keep(vetted=False)
            self._updates = step
            self._guard.taken(Position(step=step, batch_index=batch + 1), batch)
            return False
        self.last = verdict
        self._go_back(verdict, batch)
        return True

    def _reduced(self, loss: float | Tensor) -> tuple[float, float]:
        """Mean loss and gradient norm, equal on all ranks; NaN and Inf propagate. The norm is 0 without gradients."""
        local_loss = torch.as_tensor(loss).detach().double().reshape(())
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        local: list[Tensor] = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        sharded = any(hasattr(gradient, "_local_tensor") for gradient in gradients)
        squared = torch.zeros((), dtype=torch.float64, device=local_loss.device)
        if local:
            squared = torch.nn.utils.get_total_norm(local).double().to(local_loss.device) ** 2
        row = torch.stack((local_loss, squared))
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if size > 1:
            if dist.get_backend() == "nccl":
                row = row.to("cuda")
            dist.all_reduce(row)
        mean, total = row.tolist()
        norm = math.sqrt(total if sharded else total / size) if math.isfinite(total) else total
        return mean / size, norm

    @torch.no_grad()
    def _keep(self, *, vetted: bool) -> None:
        """Copy the state as it is before this step's update."""
        copy = _Copy(self._updates, tree_map(_to_host, self._state()), self._guard.state(), vetted)
        self._copies.append(copy)

    def _vet(self, step: int) -> None:
        """Mark states that are old enough as good after a healthy step, and drop older ones."""
        for copy in self._copies:
            copy.vetted = copy.vetted or step - copy.step >= self._guard.policy.healthy_steps
        good = [index for index, copy in enumerate(self._copies) if copy.vetted]
        del self._copies[: good[-1]]

    def _go_back(self, verdict: Verdict, batch: int) -> None:
        start, attached = time.monotonic(), current()
        if attached is not None:
            attached.refused()
        decision = self._guard.decide(verdict, batch)
        self._guard.ledger.rollbacks += 1
        usable = [copy for copy in self._copies if copy.vetted and copy.step < decision.before_step]
        back = usable[-1] if usable else self._copies[0]
        with torch.no_grad():
            self._load(tree_map(_fresh, back.state))
        for parameter in self._parameters:
            parameter.grad = None
        self._copies = [copy for copy in self._copies if copy.step <= back.step]
        self._guard.load(back.detector)
        self._guard.on_rollback(back.step)
        self._updates = back.step
        if attached is not None and attached.recorder.enabled and attached.recorder.rank == 0:
            for number in decision.batches:
                attached.event(event_kinds.BATCH_SKIPPED, batch_index=number, reason=verdict.reason)
            attached.event(
                event_kinds.ROLLBACK,
                from_step=verdict.step,
                to_step=back.step,
                tier="memory",
                verdict=verdict.kind,
                reason=verdict.reason,
                skipped_batches=list(decision.batches),
                duration_s=time.monotonic() - start,
                failures=self._guard.ledger.failures,
                rate_scale=1.0,
            )


def guard(
    state: Callable[[], Any],
    load: Callable[[Any], object],
    *,
    parameters: Iterable[nn.Parameter] = (),
    interval: int = 10,
    max_rollbacks: int = 8,
    policy: GuardPolicy | None = None,
) -> LoopGuard:
    """A guard for a user's loop; copies the state now.

    `state` returns the state to restore: any nesting of dicts and lists that hold tensors, such as state dicts. `load`
    takes such a state and restores it. Both are called on all ranks. The guard checks and clears the gradients of
    `parameters`; the default is the parameters of the models that were given to `rankscope.attach`, or that `rankscope
    run` found before the first call of `refuses`. `interval` is the number of steps between copies. Raises RunStopped
    from `refuses` after `max_rollbacks`, or earlier if failures follow each other without healthy steps in between.
    """
    return LoopGuard(
        state, load, parameters=parameters, interval=max(1, interval), max_rollbacks=max_rollbacks, policy=policy
    )


def _attached_parameters() -> list[nn.Parameter]:
    attached = current()
    if attached is None or not attached.parameters:
        raise ValueError(
            "rankscope.guard knows no parameters: pass parameters=model.parameters(), or call rankscope.attach(model)"
        )
    return attached.parameters


def _to_host(value: Any) -> Any:
    """Copy a plain tensor to the host; copy a sharded tensor on its device."""
    if not isinstance(value, Tensor):
        return value
    if type(value) is Tensor and not value.is_cpu:
        return value.detach().to("cpu", copy=True)
    return value.detach().clone()


def _fresh(value: Any) -> Any:
    """Copy the stored tensors before `load`, because an optimizer keeps the tensors that it is given."""
    return value.clone() if isinstance(value, Tensor) else value
