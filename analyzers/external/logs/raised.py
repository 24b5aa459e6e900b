"""Exceptions in logs: their type, whether they are a launcher's summary, and whether they only speak of a peer."""

from __future__ import annotations

import re

from analyzers.external.logs.book import Said
from analyzers.run.endings import LOST_PEER
from store.readers.logs.rules import cause_of

__all__ = ["is_launchers", "is_stop", "is_victims", "own_frame", "text_of", "type_of"]

_LAUNCHERS = (
    "ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException", "SystemExit",
    "SignalException", "RendezvousGracefulExitError", "RendezvousConnectionError", "ActorDiedError", "RayActorError",
    "WorkerCrashedError",
)  # fmt: skip
_BACKENDS = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError", "BrokenPipeError")
_TIMEOUTS = ("Watchdog caught collective operation timeout", "timed out in blocking wait", "watchdog got stuck")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INNER = re.compile(r"RayTaskError\((\w+)\)")


def type_of(said: Said) -> str:
    name = said.text("type").rsplit(".", 1)[-1]
    inner = _INNER.search(f"{said.text('type')} {said.message}")
    return inner[1] if inner else name


def text_of(said: Said) -> str:
    return f"{said.text('type')}: {said.text('message')} {said.message}"


def is_launchers(said: Said) -> bool:
    return type_of(said) in _LAUNCHERS


def is_stop(said: Said) -> bool:
    return type_of(said) == "KeyboardInterrupt"


def is_victims(said: Said) -> bool:
    """Return True if an exception reports a peer's end or an aborted call, and no cause of its own."""
    text = text_of(said)
    rule = cause_of(text)
    if rule is not None:
        return rule.role == "victim" or (rule.role == "nccl" and LOST_PEER.search(text) is not None)
    return type_of(said) in _BACKENDS or any(mark in text for mark in _TIMEOUTS) or LOST_PEER.search(text) is not None


def own_frame(traceback: str) -> str:
    """The innermost line that is not in an installed package: `data/loader.py:41 in __getitem__`."""
    frames = [(m[1], m[2], m[3]) for m in _FRAME.finditer(traceback)]
    own = [f for f in frames if not re.search(r"(site|dist)-packages|/lib/python\d|<frozen|<string>", f[0])]
    chosen = (own or frames)[-1:]
    return "".join(f"{'/'.join(path.split('/')[-2:])}:{line} in {function}" for path, line, function in chosen)
