"""Import names of the packages: `rankscope.probes` everywhere, and `probes` in processes that run no user code.

    import rankscope
    rankscope.attach(model, optimizer)      # a user's process: only `rankscope.probes...` is imported, no short name

    from rankscope.import_names import claim_names
    claim_names()                           # a process of Rankscope: `import trainer` is Rankscope's trainer

The packages `probes`, `trainer` etc. are top-level folders of the project, and a training script may have a `trainer`
package or a `probes.py` of the same name next to it. So code that runs in a user's process is in `probes`, with
relative imports, under the name `rankscope.probes`. A process that runs no user code calls `claim_names` first: the
short names then take precedence over `sys.path`, and `rankscope.<package>` gives the same modules, so that no module is
loaded twice.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["FOLDER", "PACKAGES", "claim_names"]

PACKAGES = ("probes", "store", "analyzers", "watch", "trainer", "dashboard")

_HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = _HERE if os.path.isdir(os.path.join(_HERE, PACKAGES[0])) else os.path.dirname(_HERE)
"""The folder with the packages: in a wheel the package `rankscope`, in a checkout its parent."""


class _SameModule(Loader):
    """Loads `rankscope.<package>...` as the module that has the short name."""

    def __init__(self, short_name: str) -> None:
        self._short_name = short_name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._short_name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # restore the spec, which the import system has replaced with the alias's spec


class _ShortNames(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in PACKAGES:
            return PathFinder.find_spec(fullname, [FOLDER], target)
        front, _, short_name = fullname.partition(".")
        if front == "rankscope" and short_name.partition(".")[0] in PACKAGES:
            return ModuleSpec(fullname, _SameModule(short_name))
        return None


def claim_names() -> None:
    """Make the short names mean Rankscope's packages in this process. Must not be called in a process that runs user
    code.
    """
    if not any(isinstance(finder, _ShortNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ShortNames())
