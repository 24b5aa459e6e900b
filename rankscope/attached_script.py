"""Run a training script unchanged, attached to the model that it trains.

    python -m rankscope.attached_script train.py --lr 1e-3           # what `rankscope run` starts as each rank
    python -m rankscope.attached_script -m my.package.train

The script is `__main__`, with its own arguments and its own folder first on the path, as if Python had started it.
"""

from __future__ import annotations

import os
import runpy
import sys

TYPE_CHECKING = False  # the constant of `typing`, without its import in a user's process

__all__ = ["main"]


def main(words: list[str]) -> None:
    """Attach, then run the script or module with its arguments."""
    if TYPE_CHECKING:
        from probes.attach.auto_attach import attach_to_whatever_trains
        from probes.attach.launch.parent_death import end_with_launcher
        from probes.attach.started_ranks import follow_started_ranks
        from probes.tape.run_facts import note_module
    else:
        from rankscope.probes.attach.auto_attach import attach_to_whatever_trains
        from rankscope.probes.attach.launch.parent_death import end_with_launcher
        from rankscope.probes.attach.started_ranks import follow_started_ranks
        from rankscope.probes.tape.run_facts import note_module

    is_module = words[:1] == ["-m"]
    target, arguments = (words[1], words[2:]) if is_module else (words[0], words[1:])
    end_with_launcher()
    sys.argv = [target, *arguments]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(target))
    attached = attach_to_whatever_trains()
    if os.environ.get("LOCAL_WORLD_SIZE") == "1" and attached.run_dir is not None:
        follow_started_ranks(attached)
    if "RANKSCOPE_DRILL" in os.environ:
        _inject(os.environ["RANKSCOPE_DRILL"])
    with attached.end.exits_of_script():
        if is_module:
            note_module(target)
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


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
