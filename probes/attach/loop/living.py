"""A set of the user's objects by identity, which does not keep them alive.

    watched = Living()
    watched.add(optimizer)         # False if it is known
    optimizer in watched           # even if its class defines equality
    list(watched)                  # those that still exist

A process may train many models, as a sweep, a cross-validation or an inner loop of meta-learning does: a reference to
each would keep its parameters and optimizer's state in memory. An object that allows no weak reference is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from weakref import ref

__all__ = ["Living"]


class Living:
    """A set of objects."""

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._objects: dict[int, Callable[[], Any]] = {}
        for one in objects:
            self.add(one)

    def add(self, one: Any) -> bool:
        """Add an object; returns False if it was there."""
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


def _same(one: Any) -> Any:
    return one
