"""The states of a checkpoint, and the allowed transitions.

    states = States()
    states.advance(50, "writing"); states.advance(50, "complete")
    states.of(50)                       # "complete"
    states.advance(50, "good")          # raises IllegalTransition: it was not verified

writing -> complete -> verified -> good; then condemned or removed:

* writing: the shards are being written to a folder that loading ignores,
* complete: the manifest is written and the folder has its final name,
* verified: every file was read back from the disk and has the hash that was computed from memory,
* good: enough healthy steps have followed its state,
* condemned: never to be used again; failed: the save was aborted; removed: by retention, or because it was never
  finished.

Every change is recorded as an event, so the store's table `checkpoints` holds the history.
"""

from __future__ import annotations

__all__ = ["FOLLOWERS", "IllegalTransition", "States"]

FOLLOWERS: dict[str, frozenset[str]] = {
    "": frozenset({"writing"}),
    "writing": frozenset({"complete", "failed", "condemned", "removed"}),
    "complete": frozenset({"verified", "failed", "condemned", "removed"}),
    "verified": frozenset({"good", "condemned", "removed"}),
    "good": frozenset({"condemned", "removed"}),
    # The step may be saved again: after a rollback, or when the disk has space again.
    "failed": frozenset({"writing"}),
    "condemned": frozenset({"writing", "removed"}),
    "removed": frozenset({"writing"}),
}
"""State -> states that may follow it; "" means no state yet."""


class IllegalTransition(RuntimeError):
    """A transition that is not allowed: a bug in Rankscope."""


class States:
    """The state of each step's checkpoint on disk."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}

    def of(self, step: int) -> str:
        """The state of a step's checkpoint, "" if there is none."""
        return self._states.get(step, "")

    def advance(self, step: int, state: str) -> None:
        """Change the state. Raises IllegalTransition."""
        before = self.of(step)
        if state not in FOLLOWERS[before]:
            raise IllegalTransition(f"checkpoint of step {step}: {state!r} cannot follow {before or 'nothing'!r}")
        self._states[step] = state

    def found(self, step: int, state: str) -> None:
        """Set the state in which a checkpoint was found on the disk, without checking the transition."""
        self._states[step] = state
