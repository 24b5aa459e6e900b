"""Closures that compute gradients inside an optimizer's `step` (Lightning, L-BFGS); the update begins after them.

before_closure_returns(args, kwargs, again=..., begins=...)     # in a hook before the step: its new arguments
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["before_closure_returns"]


def before_closure_returns(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, again: Callable[[], None], begins: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call `begins` when the closure returns, or now if there is no closure; returns the new arguments, None if they
    stay. Before a repeated call of the closure, call `again`: the update before it is over."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        begins()
        return None

    def before_the_update(*its: Any, **named: Any) -> Any:
        again()
        result = closure(*its, **named)
        begins()
        return result

    if len(args) > 1:
        return (args[0], before_the_update, *args[2:]), kwargs
    return args, {**kwargs, "closure": before_the_update}
