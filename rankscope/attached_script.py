"""Run a training script unchanged, attached to the model that it trains.

    python -m rankscope.attached_script train.py --lr 1e-3           # what `rankscope run` starts as each rank
    python -m rankscope.attached_script -m my.package.train

The script is `__main__`, with its own arguments and its own folder first on the path, as if Python had started it.
torch is already imported by then, so environment variables that the script sets for torch are applied when it imports
torch.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys

TYPE_CHECKING = False  # replaces `typing.TYPE_CHECKING`, whose import a user's process can do without
if TYPE_CHECKING:
    from typing import Any

__all__ = ["follow_environment", "main"]

_NUM_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"


def main(words: list[str]) -> None:
    """Attach, then run the script or module with its arguments."""
    if TYPE_CHECKING:
        from probes.attach.auto_attach import auto_attach
        from probes.attach.launch.parent_death import end_with_launcher
        from probes.attach.started_ranks import follow_started_ranks
        from probes.tape.run_facts import note_module
    else:
        from rankscope.probes.attach.auto_attach import auto_attach
        from rankscope.probes.attach.launch.parent_death import end_with_launcher
        from rankscope.probes.attach.started_ranks import follow_started_ranks
        from rankscope.probes.tape.run_facts import note_module

    is_module = words[:1] == ["-m"]
    target, arguments = (words[1], words[2:]) if is_module else (words[0], words[1:])
    end_with_launcher()
    sys.argv = [target, *arguments]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(target))
    attached = auto_attach()
    if os.environ.get("LOCAL_WORLD_SIZE") == "1" and attached.run_dir is not None:
        follow_started_ranks(attached)
    if "RANKSCOPE_DRILL" in os.environ:
        _inject(os.environ["RANKSCOPE_DRILL"])
    if not is_module and _names_variables(target):
        follow_environment()
    with attached.end.exits_of_script():
        if is_module:
            note_module(target)
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


def _names_variables(script: str) -> bool:
    """Return True if the script may set one of the variables. For other scripts `__import__` is not replaced, because
    the replacement costs time and adds a frame to the traceback of each failed import.
    """
    try:
        with open(script, "rb") as file:
            text = file.read()
    except OSError:  # the path is a folder or an archive, which runpy can run
        return False
    return any(name.encode() in text for name in (*_NUM_THREADS, _DEBUG))


def follow_environment() -> None:
    """At the script's import of torch, apply variables that torch has already read and that the script has changed."""
    real = builtins.__import__
    before = {name: os.environ.get(name) for name in (*_NUM_THREADS, _DEBUG)}

    def imports(name: str, *arguments: Any, **named: Any) -> object:
        is_relative = any(arguments[3:]) or bool(named.get("level"))
        if name.partition(".")[0] == "torch" and not is_relative and builtins.__import__ is imports:
            builtins.__import__ = real
            _apply({name: value for name in before if (value := os.environ.get(name)) not in (None, before[name])})
        return real(name, *arguments, **named)

    builtins.__import__ = imports  # type: ignore[assignment]


def _apply(changed: dict[str, str]) -> None:
    import torch

    if threads := next((changed[name] for name in _NUM_THREADS if changed.get(name, "").isdecimal()), ""):
        torch.set_num_threads(max(1, int(threads)))
    if _DEBUG in changed and torch.distributed.is_available():
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]  # public, not exported to types


def _inject(fault: str) -> None:
    """Prepare the rank for the fault of a drill."""
    if TYPE_CHECKING:
        from probes.attach.injection import inject
    else:
        from rankscope.probes.attach.injection import inject
    inject(fault)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1:] == ["-m"]:
        sys.exit("rankscope.attached_script: name a script, or -m and a module")
    main(sys.argv[1:])
