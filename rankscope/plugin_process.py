"""The process of one plug-in: `store.plugins.process` starts it.

python -m rankscope.plugin_process analyzers.plugin_calls.child rankscope.analyzers slow_save
"""

from __future__ import annotations

import importlib
import sys

from rankscope.import_names import claim_names

__all__: list[str] = []

if __name__ == "__main__":
    claim_names()
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
