"""A set of weak references to the user's objects, compared by identity.

    watched = WeakObjects()
    watched.add(optimizer)         # False if it was already there
    optimizer in watched           # even if its class defines equality
    list(watched)                  # those that still exist

    class Loop:
        leader = WeakReference()      # an attribute that does not keep its optimizer alive

A process may train many models, for example in a sweep, a cross-validation or an inner loop of meta-learning. Strong
references would keep all their parameters and optimizer state in memory. An object that allows no weak reference is
kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import finalize, ref

__all__ = ["DeletedOptimizer", "WeakObjects", "WeakReference"]


class WeakObjects:
    """A set of weakly referenced objects."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._objects: dict[int, Callable[[], Any]] = {}
        for one in objects:
            self.add(one)

    def add(self, one: Any) -> bool:
        """Add an object; return False if it was already in the set."""
        if one in self:
            return False
        try:
            self._objects[id(one)] = ref(one)
        except TypeError:
            self._objects[id(one)] = partial(_same, one)
        return True

    def discard(self, one: Any) -> None:
        """Remove an object, if it is there."""
        if one in self:
            del self._objects[id(one)]

    def clear(self) -> None:
        """Remove all objects."""
        self._objects.clear()

    def __contains__(self, one: Any) -> bool:
        found = self._objects.get(id(one))
        return found is not None and found() is one

    def __iter__(self) -> Iterator[Any]:
        for number, found in list(self._objects.items()):
            if (one := found()) is None:
                del self._objects[number]
            else:
                yield one


class DeletedOptimizer:
    """Replaces a deleted optimizer, and holds its parameters that still exist."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = WeakObjects(parameters)
        self._had_any = bool(self._parameters._objects)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group with these parameters, in the form of `torch.optim.Optimizer.param_groups`."""
        return [{"params": list(self._parameters)}]

    @property
    def is_empty(self) -> bool:
        """True if all its parameters are gone, too."""
        return self._had_any and not list(self._parameters)


class WeakReference:
    """A weak reference to an optimizer, used as an attribute; a `DeletedOptimizer` once the optimizer is deleted."""

    def __init__(self, *, keeps_parameters: bool = True, at_end: Callable[[Any], object] | None = None) -> None:
        """`at_end` is called with the attribute's owner when the optimizer is deleted."""
        self._keeps_parameters, self._at_end = keeps_parameters, at_end

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}_reference"

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        reference, remnant = owner.__dict__.get(self._name, (_nothing, None))
        one = reference()
        return remnant if one is None else one

    def __set__(self, owner: Any, one: Any) -> None:
        if one is None or one is self.__get__(owner, type(owner)):
            return
        groups = getattr(one, "param_groups", ()) if self._keeps_parameters else ()
        remnant = DeletedOptimizer(parameter for group in groups for parameter in group.get("params", ()))
        try:
            owner.__dict__[self._name] = ref(one), remnant
        except TypeError:
            owner.__dict__[self._name] = partial(_same, one), remnant
            return
        if (at_end := self._at_end) is not None:
            of_owner = ref(owner)

            def end() -> None:
                if (found := of_owner()) is not None and found.__dict__.get(self._name, (None, None))[1] is remnant:
                    at_end(found)

            finalize(one, end).atexit = False

    def __delete__(self, owner: Any) -> None:
        owner.__dict__.pop(self._name, None)


def _nothing() -> None:
    return None


def _same(one: Any) -> Any:
    return one
