"""Serve calls to a reader plug-in from a separate process.

python -m rankscope.plugin_process store.readers.plugins.plugin_child rankscope.readers team_steps
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from store.plugins.child import Channel, Handlers, serve
from store.readers.plugins.plugin_rows import checked_rows

__all__ = ["main"]


def _handlers(module: ModuleType, channel: Channel) -> Handlers:
    if missing := [name for name in ("recognise", "read") if not hasattr(module, name)]:
        raise AttributeError(f"{module.__name__} has no {' and no '.join(missing)}")

    def recognise(first: bytes) -> bool:
        return bool(module.recognise(first))

    def read(path: str) -> Channel:
        channel.send_rows(checked_rows(module.read(Path(path))))
        return channel

    return {"recognise": recognise, "read": read}


def main() -> None:
    """Serve until the parent exits."""
    serve(_handlers)
