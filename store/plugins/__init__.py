"""Plug-ins from other installed packages; each entry point runs in a child process with limits on time and memory.

    for plugin in plugins("rankscope.readers", "store.readers.plugins.plugin_child"):
        try:
            plugin.call("recognise", first)
        except PluginError as error:            # one line: it raised, hung, exited, or took too much memory
            print(plugin.name, error)

A plug-in can hang, exit, crash or fill its memory: the calling process continues, and gets the reason as a PluginError.
"""

from __future__ import annotations

from store.plugins.process import LIMIT_VARIABLE, MAX_REASON_CHARS, PluginError, PluginProcess, plugins

__all__ = ["LIMIT_VARIABLE", "MAX_REASON_CHARS", "PluginError", "PluginProcess", "plugins"]
