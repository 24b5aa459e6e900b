"""Score of one run of a script drill: was the fault found, with the right kind, rank, cause and place?

row = score(fault, done)
row.is_right, row.seen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from analyzers.deaths.rank_lost import ON_PURPOSE
from analyzers.finding import Finding
from probes.attach.injected_fault import InjectedFault
from probes.tape import event_kinds
from probes.tape.format.reader import TapeError
from store import Store, StoreError
from trainer.drills.script.execute import Done
from trainer.drills.script.faults import SCRIPT_FAULTS, ScriptFault
from watch.verdicts.diagnosed_run import diagnosed_run

__all__ = ["ScriptRow", "median_step_s", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRow:
    """Score of one run. `seen`: "live", "after" (only post-mortem) or empty. A field `right_...` is None if nothing was
    seen or the fault does not determine it."""

    fault: str
    what: str
    rank: int
    is_injected: bool = True
    seen: str = ""
    right_rank: bool | None = None
    right_cause: bool | None = None
    right_place: bool | None = None
    right_step: bool | None = None
    finding_s: float | None = None
    steps_after: int = 0
    """Number of steps from the fault to the end."""
    summary: str = ""
    line: str = ""
    """The line of code that the finding names."""
    false_alarms: tuple[str, ...] = ()
    problem: str = ""
    wall_s: float = 0.0
    run: str = ""

    @property
    def is_right(self) -> bool:
        """True if nothing is wrong. A fault that the script has no place for is not an error."""
        if self.problem or self.false_alarms:
            return False
        if not self.is_injected or not SCRIPT_FAULTS[self.fault].kinds:
            return True
        rights = (self.right_rank, self.right_cause, self.right_place, self.right_step)
        return bool(self.seen) and False not in rights

    def to_json(self) -> dict[str, Any]:
        """All fields, and `is_right`."""
        return {name: getattr(self, name) for name in self.__slots__} | {"is_right": self.is_right}


def score(fault: InjectedFault | None, done: Done) -> ScriptRow:
    """Judge the finished run."""
    name, rank = (fault.name, fault.rank) if fault is not None else ("none", -1)
    wanted = SCRIPT_FAULTS[name]
    row = ScriptRow(
        fault=name, what=wanted.what, rank=rank, wall_s=round(done.wall_s, 1), run=str(done.run.path),
        problem=done.problem,
    )  # fmt: skip
    if not any(done.run.rank_dirs()):
        return row
    try:
        with diagnosed_run(done.run, is_over=True) as (store, diagnosis):
            shown = (*diagnosis.fired, *(found for found in diagnosis.advised if found.kind in wanted.kinds))
            return _scored(row, wanted, fault, done, store, shown)
    except (StoreError, TapeError) as error:
        return replace(row, problem=row.problem or str(error))


def median_step_s(done: Done) -> float | None:
    """Median duration of the steps in the second half of a run; None without steps."""
    with Store.open(done.run) as store:
        ((median_ns,),) = store.rows(
            "SELECT median(duration_ns) FROM steps WHERE step > (SELECT max(step) / 2 FROM steps)"
        )
    return None if median_ns is None else float(median_ns) / 1e9


def _scored(
    row: ScriptRow, wanted: ScriptFault, fault: InjectedFault | None, done: Done, store: Store, found: Sequence[Finding]
) -> ScriptRow:
    injections = store.rows("SELECT wall_ns, step FROM events WHERE kind = ? ORDER BY 1", [event_kinds.FAULT_INJECTED])
    alarms = [one for one in found if one.kind not in wanted.allowed and not _is_our_end(one.kind, one.cause, done)]
    if not wanted.kinds or not injections:
        summaries = (*(one.summary for one in alarms), *_taken_back(store, found, wanted, -1, done))
        return replace(row, is_injected=not wanted.kinds, false_alarms=summaries, steps_after=done.num_steps)
    matching = [one for one in found if one.kind in wanted.kinds and not _is_our_end(one.kind, one.cause, done)]
    best = min(matching, key=lambda one: (row.rank not in one.ranks, one.cause not in wanted.causes), default=None)
    false = (*(o.summary for o in alarms if o is not best), *_taken_back(store, found, wanted, row.rank, done))
    if best is None:
        return replace(row, false_alarms=false)
    when_ns = _reported_ns(store, best.kind)
    place = best.evidence.get("place")
    return replace(
        row,
        seen="live" if when_ns is not None else "after",
        finding_s=None if when_ns is None else round((when_ns - injections[0][0]) / 1e9, 1),
        right_rank=_is_right_rank(wanted, best, row.rank) if wanted.names_rank else None,
        right_cause=best.cause in wanted.causes if wanted.causes else None,
        right_place=place in wanted.places if wanted.places else None,
        right_step=None if wanted.lasts else _is_right_step(best, injections[0][1]),
        steps_after=done.num_steps - (fault.step if fault else 0),
        summary=best.summary,
        line=str(best.evidence.get("line") or ""),
        false_alarms=false,
    )


def _taken_back(store: Store, found: Sequence[Finding], wanted: ScriptFault, rank: int, done: Done) -> list[str]:
    """Live findings that are neither repeated post-mortem nor about the fault. They count as false alarms, too."""
    stands = {(one.kind, tuple(one.ranks)) for one in found}
    rows = store.rows("SELECT finding_kind, finding_ranks, cause, summary FROM findings WHERE status = 'fired'")
    texts = [
        f"Reported live: {summary}"
        for kind, ranks, cause, summary in rows
        if (kind, tuple(ranks or ())) not in stands
        and kind not in wanted.allowed
        and not (kind in wanted.kinds and rank in (ranks or ()))
        and not _is_our_end(kind, cause, done)
    ]
    return list(dict.fromkeys(texts))


def _is_right_rank(wanted: ScriptFault, found: Finding, rank: int) -> bool:
    return tuple(found.ranks) == (rank,) or (wanted.is_among and rank in found.ranks)


def _is_right_step(found: Finding, step: int | None) -> bool:
    """Return True for the step in which the fault struck, or the next one."""
    return found.first_step is not None and step is not None and 0 <= found.first_step - step <= 1


def _is_our_end(kind: str, cause: str, done: Done) -> bool:
    """Return True if the finding is about the drill ending the run."""
    return done.is_stopped and kind == "rank_lost" and cause in (ON_PURPOSE, "killed_all", "vanished", "launcher_lost")


def _reported_ns(store: Store, kind: str) -> int | None:
    rows = store.rows("SELECT min(wall_ns) FROM findings WHERE finding_kind = ? AND status = 'fired'", [kind])
    return None if rows[0][0] is None else int(rows[0][0])
