"""A hook on the user's model that has no effect in copies and pickles of that model.

    undo = model.register_forward_hook(ModelHook(model, self._after_forward)).remove
    without_hooks(torch.save, model, path)

Hooks are kept in the model's own dictionaries, so they are included when a loop copies the model (`copy.deepcopy`, an
average of its weights, a target network), pickles it or sends it to another process. There a hook of this class becomes
a no-op function of Python's standard library: the recorder cannot be copied, a copy does not train, and a pickle must
load without Rankscope. Three functions do not accept even a no-op, so hooks are removed for them: `torch.save`,
because `torch.load` would refuse its name, `torch.jit.script`, which translates each hook, and
`torch.cuda.make_graphed_callables`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

from torch import nn

__all__ = ["ModelHook", "script_without_hooks", "without_hooks"]

_NOTHING = nullcontext().__exit__
_OUR_FRAMES = 3
"""Frames between `torch.jit.script` and its caller: `replaced`, `script_without_hooks` and `without_hooks`."""
_DICTIONARIES = ("_forward_pre_hooks", "_forward_hooks")
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
"""Dictionaries with the numbers of hooks as keys. In another process the same number may belong to another hook."""


_hooked: WeakSet[nn.Module] = WeakSet()


class ModelHook:
    """A forward hook that acts only in the module it was registered with, never in a copy of it."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._call = call
        _hooked.add(module)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _NOTHING

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def without_hooks(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with hooks of this class removed from all modules; models that it calls are not recorded."""
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    modules = list(_hooked)
    dictionaries = (getattr(module, name) for module in modules for name in _DICTIONARIES)
    numbers = {number for hooks in dictionaries for number, hook in hooks.items() if isinstance(hook, ModelHook)}
    for hooks in (getattr(module, name) for module in modules for name in (*_DICTIONARIES, *_FLAGS)):
        if ours := hooks.keys() & numbers:
            taken.append((hooks, dict(hooks)))
            for number in ours:
                del hooks[number]
    try:
        return real(*args, **kwargs)
    finally:
        for hooks, before in taken:
            added = {number: hook for number, hook in hooks.items() if number not in before}
            hooks.clear()
            hooks.update(before | added)


def script_without_hooks(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `torch.jit.script` without our hooks; names that a class uses are still looked up in the original caller's
    frame."""
    kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + _OUR_FRAMES
    return without_hooks(real, *args, **kwargs)
