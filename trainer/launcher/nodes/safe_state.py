"""Load torch's rendezvous state safely: its pickle may only name classes of the rendezvous.

    backend = SafeStateBackend(C10dRendezvousBackend(store, "rankscope"))

torch keeps the rendezvous state as a pickle in the store, and loads whatever it finds there, so anyone who can reach
the store could run code in a launcher. Here each state is first read by an unpickler that only knows the state's
classes; any other content is refused with an error.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

__all__ = ["SafeStateBackend", "check_state"]

MAX_STATE_BYTES = 16 << 20
_RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_ALLOWED = frozenset({
    (_RENDEZVOUS, "_RendezvousState"), (_RENDEZVOUS, "_NodeDesc"), ("datetime", "datetime"), ("datetime", "timedelta"),
    ("datetime", "timezone"), ("builtins", "set"),
})  # fmt: skip


class SafeStateBackend(RendezvousBackend):
    """A rendezvous backend that checks states before it returns them."""

    def __init__(self, backend: RendezvousBackend) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """Read the state of `backend`. Raises RendezvousStateError for a state that names other classes."""
        found = self._backend.get_state()
        if found is not None:
            check_state(found[0])
        return found

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set the state of `backend`. If another node has set a state instead, check that one."""
        found = self._backend.set_state(state, token)
        if found is not None:
            check_state(found[0])
        return found


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return super().find_class(module, name)


def check_state(state: bytes) -> None:
    """Raise RendezvousStateError unless `state` is a pickle of a rendezvous state."""
    try:
        if len(state) > MAX_STATE_BYTES:
            raise pickle.UnpicklingError(f"has {len(state)} bytes")
        _StateUnpickler(io.BytesIO(state)).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise RendezvousStateError(f"the rendezvous state in the store was refused: {error}") from None
