"""Closures that compute gradients inside an optimizer's `step` (Lightning, L-BFGS); the update begins after them.

around_closure(args, kwargs, before=..., after=...)     # in a hook before the step: its new arguments
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["around_closure"]


def around_closure(
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
