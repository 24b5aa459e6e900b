"""State shared by the recorded process groups of one recorder: their labels, and how they are released.

probe = GroupProbe(recorder, check_nonfinite=True)
probe.register(group)
probe.label_new()                 # before the first collective; torch does not know the members earlier
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ..fail_open import failing_open
from ..tape import event_kinds
from ..tape_recorder import TapeRecorder
from ..torch_compat import group_world
from .call_records import Calls
from .gradients.backward_wait import BackwardWait
from .gradients.local_gradient import UnreducedNorm
from .groups.group_label import group_label

__all__ = ["GroupProbe"]


class GroupProbe:
    """State shared by the recorded groups of one recorder."""

    def __init__(self, recorder: TapeRecorder, *, check_nonfinite: bool, has_plugin: bool = False) -> None:
        self.recorder = recorder
        self._has_plugin = has_plugin
        self.calls = Calls(recorder, check_nonfinite=check_nonfinite)
        self.backward = BackwardWait(self.calls)
        self.unreduced = UnreducedNorm()
        self._unlabelled: list[weakref.ref[Any]] = []
        self._labels: dict[str, int] = {}
        self._groups: list[weakref.ref[Any]] = []

    def register(self, group: Any) -> None:
        """Register a new group. All members create groups in the same order."""
        self.calls.callbacks.release()
        self._unlabelled.append(weakref.ref(group))
        self._groups.append(weakref.ref(group))

    def release(self) -> None:
        """Stop recording in all groups."""
        for reference in self._groups:
            if (group := reference()) is not None:
                group.pass_on()

    def label_new(self) -> None:
        """Give each group made so far its label, in the order in which they were made.

        The wrapper calls this before the first collective, not in its constructor, because torch does not know a
        group's members until the group has been created.
        """
        waiting, self._unlabelled = self._unlabelled, []
        for reference in waiting:
            group = reference()
            if group is not None:
                with failing_open("collectives.label"):
                    self._label_one(group)

    def _label_one(self, group: Any) -> None:
        members = _members(group)
        if members is None:
            self._unlabelled.append(weakref.ref(group))
            return
        label = self._write_event(group, members, "wrapper")
        group.calls.members = members
        kind = label.partition(":")[0]
        # A one-dimensional mesh reduces gradients in the world group. Other reductions there do no harm, because only
        # reductions in the backward pass are taken for gradients.
        group.calls.dimension = kind if kind.startswith("dp_") or kind == "world" else ""
        group.calls.label = self.recorder.name(label)

    def announce_plain(self, group: Any, members: Sequence[int]) -> None:
        """Announce a group of which no wrapper records the calls. Groups that were made earlier are announced first."""
        self.label_new()
        self._write_event(group, list(members), "nccl_plugin" if self._has_plugin else "nothing")

    def _write_event(self, group: Any, members: list[int], recorded_by: str) -> str:
        """Write the event of a group; returns its label."""
        label = group_label(group.group_desc, members)
        number = self._labels[label] = self._labels.get(label, 0) + 1
        if number > 1:
            label = f"{label}#{number}"
        self.recorder.event(
            event_kinds.PROCESS_GROUP,
            process_group=label,
            description=group.group_desc,
            group_name=group.group_name,
            recorded_by=recorded_by,
            members=members,
        )
        return label


def _members(group: Any) -> list[int] | None:
    """Global ranks of the members in the order of their group ranks; None while torch doesn't know them."""
    if group.members is not None:
        return list(group.members)
    ranks = group_world().pg_group_ranks.get(group)
    return None if ranks is None else sorted(ranks, key=ranks.__getitem__)
