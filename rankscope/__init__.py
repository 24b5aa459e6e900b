"""The public interface: the `rankscope` command (`cli`, `commands/`) and the functions that a training script imports.

    import rankscope

    rankscope.attach(model, optimizer)          # docs/attach.md
    rankscope.log(loss=loss)
    with rankscope.phase("generation"): ...     # a phase with a custom name
    rankscope.describe(mesh=device_mesh)        # optional
    guard = rankscope.guard(state, load)

and the function with which a notebook or a service reads runs:

    run = rankscope.open_run("runs/latest")     # docs/api.md

Everything is imported on first use, so that `import rankscope` in a script does not load the command line.
"""

from __future__ import annotations

import os

__all__ = [
    "__version__", "attach", "describe", "detach", "guard", "log", "open", "open_files", "open_run", "phase",
]  # fmt: skip
__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rankscope.api import open, open_files, open_run
    from rankscope.probes.attach.attach import attach, describe, detach, log, phase
    from rankscope.probes.guard.attached_loop import guard

_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "probes")):
    # A checkout: the packages lie next to this one. In a wheel the packages are inside it (pyproject.toml, `sources`).
    __path__.append(os.path.dirname(_HERE))

_EXPORTS = {
    "attach": "probes.attach.attach:attach",
    "describe": "probes.attach.attach:describe",
    "detach": "probes.attach.attach:detach",
    "log": "probes.attach.attach:log",
    "phase": "probes.attach.attach:phase",
    "guard": "probes.guard.attached_loop:guard",
    "open": "api:open",
    "open_files": "api:open_files",
    "open_run": "api:open_run",
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module, _, attribute = _EXPORTS[name].partition(":")
    found: object = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
