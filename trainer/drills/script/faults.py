"""Faults that do not need Rankscope's trainer, and the finding that each must produce.

    SCRIPT_FAULTS["slow_forward"].places         # ("forward",)
    chosen_faults("kill,slow")

`probes.attach.injection` carries them out in the ranks. Needs no torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

__all__ = ["SCRIPT_FAULTS", "ScriptFault", "chosen_faults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFault:
    """One fault: what happens, and the right finding. If `kinds` is empty, every finding is a false alarm."""

    what: str
    kinds: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    """The finding must name one of these phases or gaps; empty: any."""
    names_rank: bool = True
    is_among: bool = False
    """True if the finding may name the rank together with others. If the sizes of two ranks differ, for instance,
    nothing shows which one is wrong."""
    lasts: bool = False
    """True if the fault acts from its step to the end of the script, False if it strikes once."""
    hangs: bool = False
    """True if the run hangs until the drill ends it."""
    least_steps: int = 0
    least_s: float = 0.0
    """Minimum steps and seconds of training after the fault, because the finding needs them."""
    allowed: tuple[str, ...] = ()
    """Kinds that may also be reported."""


def _slow(what: str, *places: str) -> ScriptFault:
    causes = ("data",) if places == ("data",) else ("host", "compute")
    return ScriptFault(
        what=f"a rank is slower {what}", kinds=("straggler",), causes=causes, places=places, lasts=True,
        allowed=("throughput", "data_bound"),
    )  # fmt: skip


def _ends(what: str, *causes: str) -> ScriptFault:
    return ScriptFault(what=what, kinds=("rank_lost",), causes=causes)


def _stuck(what: str, *causes: str) -> ScriptFault:
    return ScriptFault(what=what, kinds=("hang",), causes=causes, hangs=True)


SCRIPT_FAULTS: dict[str, ScriptFault] = {
    "none": ScriptFault(what="nothing happens"),
    # If a loop creates its batches itself, the time before forward counts as the end of the previous step.
    "slow_batch": _slow("before forward", "before_forward", "after_optimizer", "data"),
    "slow_data": _slow("in its data loader", "data"),
    "slow_forward": _slow("in forward", "forward"),
    "slow_after_forward": _slow("between forward and backward", "forward_to_backward"),
    "slow_backward": _slow("in backward", "backward"),
    "slow_before_optimizer": _slow("between backward and the optimizer", "backward_to_optimizer"),
    "slow_optimizer": _slow("in the optimizer", "optimizer"),
    "slow_after_optimizer": _slow("after the optimizer", "after_optimizer", "before_forward"),
    "busy_forward": _slow("in forward, computing", "forward"),
    "garbage": _slow("in garbage collections", "backward_to_optimizer"),
    "kill": _ends("a rank is killed (SIGKILL)", "signal"),
    "exit": _ends("a rank exits with code 0", "exit"),
    "exception": _ends("a rank raises ValueError", "exception"),
    "hang": _stuck("a rank sleeps forever", "not_entered", "busy", "data", "p2p_unmatched"),
    "stop": _stuck("a rank is stopped (SIGSTOP)", "stopped"),
    "gil": _stuck("a rank hangs in C and holds Python's lock", "gil", "not_entered", "busy"),
    "wrong_size": ScriptFault(
        what="a rank passes another size to an all-reduce", kinds=("hang",), hangs=True, is_among=True,
        causes=("mismatch_size", "mismatch_operation"),
    ),
    # If a call of the same size follows, the job continues. If the skipped call was the last one of the group, the
    # other ranks hang.
    "skip_collective": ScriptFault(
        what="a rank skips its all-reduces of one step", kinds=("desync", "hang"), causes=("skipped",), hangs=True,
        allowed=("hang",),
    ),
    "nan_batch": ScriptFault(what="a rank's batch holds a NaN", kinds=("non_finite",), causes=("forward", "data")),
    "inf_batch": ScriptFault(what="a rank's batch holds an Inf", kinds=("non_finite",), causes=("forward", "data")),
    "memory": ScriptFault(
        what="a rank leaks 4 MB per step", kinds=("memory_growth",), lasts=True, allowed=("straggler",),
        least_steps=300, least_s=20.0,  # long enough for many readings: memory is read once a second
    ),
    "slow_disk": ScriptFault(
        what="each save of a rank takes a second longer", kinds=("checkpoint_cost",), names_rank=False, lasts=True,
        allowed=("throughput", "checkpoint_age"),
    ),
}  # fmt: skip
"""Faults by name."""


def chosen_faults(text: str) -> list[str]:
    """Names of the faults in `all`, `slow` or a list such as `kill,slow_forward`. Raises ValueError for an unknown
    name."""
    groups = {
        "all": [name for name in SCRIPT_FAULTS if name != "none"],
        "slow": [name for name, fault in SCRIPT_FAULTS.items() if fault.kinds == ("straggler",)],
    }
    names: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word not in groups and word not in SCRIPT_FAULTS:
            near = difflib.get_close_matches(word, SCRIPT_FAULTS, n=3, cutoff=0.8)
            hint = f"did you mean {' or '.join(near)}?" if near else "see `rankscope drill --script SCRIPT --list`"
            raise ValueError(f"--faults {word}: unknown; {hint}")
        names += [name for name in groups.get(word, [word]) if name not in names]
    return names
