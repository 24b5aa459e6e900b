"""A hook on a model of the user's, of which nothing is left in what the user makes of that model.

    undo = model.register_forward_hook(ModelHook(self._after_forward)).remove

Hooks stand in the model's own dictionaries, and go along when a loop copies the model (`copy.deepcopy`, an average of
its weights, a target network), saves it whole (`torch.save(model)`) or sends it to another process. There a hook of
this class becomes a function of Python's own library that takes everything and does nothing: the recorder cannot be
copied, a copy is not what trains, and a saved model must load where Rankscope is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

__all__ = ["ModelHook", "without_hooks"]

_NOTHING = nullcontext().__exit__
_DICTIONARIES = ("_forward_pre_hooks", "_forward_hooks")


class ModelHook:
    """Calls a function of ours, in the model that it was registered with only."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def without_hooks(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch's that refuses modules whose hooks it cannot translate, while ours are away."""
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for model in args:
        for module in model.modules() if isinstance(model, nn.Module) else ():
            for hooks in (getattr(module, name) for name in _DICTIONARIES):
                if any(isinstance(hook, ModelHook) for hook in hooks.values()):
                    taken.append((hooks, dict(hooks)))
                    for number, hook in taken[-1][1].items():
                        if isinstance(hook, ModelHook):
                            del hooks[number]
    try:
        return real(*args, **kwargs)
    finally:
        for hooks, before in taken:
            added = {number: hook for number, hook in hooks.items() if number not in before}
            hooks.clear()
            hooks.update(before | added)
