"""Serve calls to one hook plug-in, in a process for this plug-in alone.

python -m rankscope.plugin_process watch.exporting.hook_child rankscope.hooks pager
"""

from __future__ import annotations

from types import ModuleType

from store.plugins.child import Channel, Handlers, serve

__all__ = ["main"]


def _handlers(module: ModuleType, channel: Channel) -> Handlers:
    if not hasattr(module, "on_finding"):
        raise AttributeError(f"{module.__name__} has no on_finding")

    def on_finding(report: object) -> None:
        module.on_finding(report)

    return {"on_finding": on_finding, "load_only": lambda: None}


def main() -> None:
    """Serve until the parent exits."""
    serve(_handlers)
