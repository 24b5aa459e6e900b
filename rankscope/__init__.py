"""Rankscope's front door: the `rankscope` command (`cli`, `commands/`) and what a training script imports.

    import rankscope

    rankscope.attach(model, optimizer)          # docs/attach.md
    rankscope.log(loss=loss)
    guard = rankscope.guard(state, load)

Nothing is imported before it is used, so that a script that says `import rankscope` pays nothing for the command line.
"""

from __future__ import annotations

import os

__all__ = ["__version__", "attach", "detach", "guard", "log"]
__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from probes.attach.attach import attach, detach, log
    from probes.guard.attached_loop import guard

_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "probes")):
    # A checkout: the packages lie beside this one. In a wheel they lie inside it (pyproject.toml, `sources`).
    __path__.append(os.path.dirname(_HERE))

_PLACES = {
    "attach": "probes.attach.attach",
    "detach": "probes.attach.attach",
    "log": "probes.attach.attach",
    "guard": "probes.guard.attached_loop",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found
