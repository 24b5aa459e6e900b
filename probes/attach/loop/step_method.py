"""Observe `step` of an optimizer: by torch's hooks, or with a call before and one after it.

    undo = hook_step(optimizer, phases)               # a list of calls that remove the hooks
    undo = around_step(optimizer, before, after)      # each is called with the optimizer

Compiled code calls the hooks between two graphs, or not at all if it must be one graph. The wrapper is an attribute of
the instance. A copy of the optimizer, or one loaded from a file, has the `step` of its class: a copied wrapper would
step the original. A closure computes gradients inside `step` (Lightning, L-BFGS), so the update begins after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from ...torch_compat import between_graphs
from .weak_objects import WeakObjects

__all__ = ["around_step", "hook_step"]

Call = Callable[[Any], None]


class _Step:
    def __init__(self, optimizer: Any, before: Call, after: Call) -> None:
        self.__wrapped__ = optimizer.step
        self._optimizer, self._before, self._after = optimizer, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self._optimizer)
        result = self.__wrapped__(*args, **kwargs)
        self._after(self._optimizer)
        return result

    def __getattr__(self, name: str) -> Any:
        """An attribute of the method: torch's learning-rate schedulers mark the methods that they have wrapped."""
        return getattr(self.__wrapped__, name)

    @property
    def __func__(self) -> Callable[..., Any]:
        """The method's function, as of any bound method: a scheduler created later wraps it."""
        return lambda optimizer, *args, **kwargs: self(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.get(id(self._optimizer), self._optimizer).step

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._optimizer, "step")


def around_step(optimizer: Any, before: Call, after: Call) -> Callable[[], object]:
    """Replace the method; returns a function that restores it, unless a scheduler has wrapped it since then."""
    is_own = "step" in vars(optimizer)  # False: the method of its class
    optimizer.step = step = _Step(optimizer, before, after)
    stepped, of_step = WeakObjects([optimizer]), ref(step)

    def restore() -> None:
        for one in stepped:
            if (step := of_step()) is not None and vars(one).get("step") is step:
                del one.step
                if is_own:
                    one.step = step.__wrapped__

    return restore


def hook_step(optimizer: Any, phases: Any) -> list[Callable[[], object]]:
    """Report each step of a torch optimizer to the `LoopPhases`; returns the calls that remove the hooks."""
    of_optimizer = ref(optimizer)

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _around_closure(
            args, kwargs, before=lambda: phases.leave("optimizer"), after=lambda: phases.before_update(optimizer)
        )

    hook = between_graphs(before, left_out=lambda: phases.updated_in_graph(of_optimizer()))
    undo: list[Callable[[], object]] = [optimizer.register_step_pre_hook(hook).remove]
    return [*undo, optimizer.register_step_post_hook(between_graphs(phases.after_update)).remove]


def _around_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, before: Callable[[], None], after: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call `before` and `after` around each call of the closure; without a closure, call `after` now. Returns the
    step's new arguments, or None if they do not change.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        after()
        return None

    def wrapped(*closure_args: Any, **closure_kwargs: Any) -> Any:
        before()
        result = closure(*closure_args, **closure_kwargs)
        after()
        return result

    if len(args) > 1:
        return (args[0], wrapped, *args[2:]), kwargs
    return args, {**kwargs, "closure": wrapped}
