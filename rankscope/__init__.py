"""Rankscope's front door: the `rankscope` command (`cli`, `commands/`) and what a training script imports.

    import rankscope

    rankscope.attach(model, optimizer)          # docs/attach.md
    rankscope.log(loss=loss)
    guard = rankscope.guard(state, load)

Nothing is imported before it is used, so that a script that says `import rankscope` pays nothing for the command line.
"""

from __future__ import annotations

__all__ = ["__version__", "attach", "detach", "guard", "log"]
__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from probes.attach import attach, detach, log
    from trainer.recovery.foreign import guard

_PLACES = {
    "attach": "probes.attach",
    "detach": "probes.attach",
    "log": "probes.attach",
    "guard": "trainer.recovery.foreign",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(f"{__name__}._rooms.{_PLACES[name]}"), name)
    globals()[name] = found
    return found
