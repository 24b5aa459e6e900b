"""The states of a checkpoint, and which may follow which.

    states = States()
    states.advance(50, "writing"); states.advance(50, "complete")
    states.of(50)                       # "complete"
    states.advance(50, "good")          # raises IllegalTransition: it was not verified

writing -> complete -> verified -> good, and from there on condemned or removed:

* writing: the shards are being written into a folder that no load reads,
* complete: the manifest is there and the folder has its name,
* verified: every file was read back from the disk and has the hash that was computed from memory,
* good: enough healthy steps followed the state that it holds,
* condemned: never to be used again; failed: the save broke off; removed: by retention, or it was never finished.

Every change is an event, so the table `checkpoints` of the store is the history.
"""

from __future__ import annotations

__all__ = ["FOLLOWERS", "IllegalTransition", "States"]

FOLLOWERS: dict[str, frozenset[str]] = {
    "": frozenset({"writing"}),
    "writing": frozenset({"complete", "failed", "condemned", "removed"}),
    "complete": frozenset({"verified", "failed", "condemned", "removed"}),
    "verified": frozenset({"good", "condemned", "removed"}),
    "good": frozenset({"condemned", "removed"}),
    # The step may be reached again: after a rollback, or with room on the disk.
    "failed": frozenset({"writing"}),
    "condemned": frozenset({"writing", "removed"}),
    "removed": frozenset({"writing"}),
}
"""State -> states that may follow it; "" is none yet."""


class IllegalTransition(RuntimeError):
    """A checkpoint cannot come into this state from the one that it is in: a mistake in our own code."""


class States:
    """The state of each step's checkpoint on disk."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}

    def of(self, step: int) -> str:
        """The state of a step's checkpoint, "" if there is none."""
        return self._states.get(step, "")

    def advance(self, step: int, state: str) -> None:
        """Raises IllegalTransition."""
        before = self.of(step)
        if state not in FOLLOWERS[before]:
            raise IllegalTransition(f"checkpoint of step {step}: {state!r} cannot follow {before or 'nothing'!r}")
        self._states[step] = state

    def found(self, step: int, state: str) -> None:
        """Set the state of a checkpoint that an earlier attempt left."""
        self._states[step] = state
