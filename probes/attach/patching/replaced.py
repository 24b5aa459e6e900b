"""Replace a function, and restore it later.

undo = replaced(torch.autograd, "backward", wrapper)       # wrapper(real, *args, **kwargs)
undo()
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["replaced"]

logger = logging.getLogger("rankscope.probes")


def replaced(
    place: Any, name: str, wrapper: Callable[..., Any], *, applies: Callable[[], bool] | None = None
) -> Callable[[], None]:
    """Replace `place.name`; while `applies()` is False, calls go to the original. Returns a function that undoes this.

    If a library version lacks the function, this is logged and nothing is replaced.
    """
    real = getattr(place, name, None)
    if real is None:
        where = getattr(place, "__name__", type(place).__name__)
        logger.warning("rankscope: this version of %s has no %s: what it does is not recorded", where, name)
        return lambda: None

    @functools.wraps(real)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if applies is not None and not applies():
            return real(*args, **kwargs)
        return wrapper(real, *args, **kwargs)

    # `pickle` refers to a function by its module and name, and accepts only the object that it finds there. Torch
    # exports functions of other modules, and each place has another wrapper.
    inside = f"{place.__qualname__}." if isinstance(place, type) else ""
    wrapped.__module__, wrapped.__qualname__ = getattr(place, "__module__", place.__name__), f"{inside}{name}"

    def restore() -> None:
        # otherwise other code has wrapped it since then and still calls Rankscope's function
        if getattr(place, name) is wrapped:
            setattr(place, name, real)

    setattr(place, name, wrapped)
    return restore
