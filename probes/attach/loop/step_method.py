"""Wrap `step` of an optimizer that does not derive from torch's, with a call before and one after it.

    undo = around_step(optimizer, before, after)      # each is called with the optimizer

The wrapper is an attribute of the instance. A copy of the optimizer, or one loaded from a file, has the `step` of its
class: a copied wrapper would step the original.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from .weak_objects import WeakObjects

__all__ = ["around_step"]

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
        """An attribute of the method: a learning-rate scheduler of torch marks the methods that it has wrapped."""
        return getattr(self.__wrapped__, name)

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function of the optimizer, as every method has: a scheduler that is made later wraps it."""
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
