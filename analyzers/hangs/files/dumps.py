"""Diagnosis of flight-recorder dumps: the hang analyzer's verdict, and which ranks left no dump.

    dumps = FILES.read(survey(folder))
    hangs_of_dumps(dumps)[0].summary  # "Rank 1 did not reach all_reduce #6 (group world:0-1): stuck in user..."

A hang has status `fired` if the ranks were silent for longer than the limit when they were dumped, if a watchdog timed
out, or if ranks made different calls at the same place. Dumps of a healthy run give no finding.

The rows of the dumps are judged like the records of a run (`hang_of_attempt`). This module adds what is special to
dumps: ranks without a dump, a write time instead of the end of the run, and ring buffers that overwrote calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from analyzers.analysis import FileAnalysis
from analyzers.finding import Finding, Status, evidence_of
from analyzers.hangs.analyze import hang_of_attempt
from analyzers.hangs.culprits import find_culprits
from analyzers.hangs.files.completed_elsewhere import with_calls_of_each, with_stuck_device
from analyzers.hangs.files.dumped_world import DumpedWorld, dumped_world
from analyzers.hangs.wait_graph import WaitGraph
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog
from analyzers.wording import ranks_text, sentence
from store.readers.dumps.flight_recorder import RankDump
from store.readers.dumps.many_dumps import read_dumps
from store.readers.untrusted.external_files import Survey

__all__ = ["FILES", "hangs_not_checked", "hangs_of_dumps", "hangs_partly_checked"]

MAX_LISTED = 16
_ENLARGE = "(set TORCH_FR_BUFFER_SIZE=2000; up to torch 2.8, TORCH_NCCL_TRACE_BUFFER_SIZE=2000)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dumps:
    """Dumps of a job, one per rank, and the state of the job that they show."""

    dumps: Sequence[RankDump]
    world: DumpedWorld | None


def _read(found: Survey) -> _Dumps:
    dumps = read_dumps(found)
    return _Dumps(dumps=dumps, world=dumped_world(dumps) if dumps else None)


def hangs_of_dumps(read: _Dumps) -> list[Finding]:
    """The hang that the dumps show, and what could not be judged from them."""
    world = read.world
    if world is None:
        return [hangs_not_checked("no dump could be read")]
    if not any(dump.num_entries or dump.calls for dump in read.dumps):
        return [hangs_not_checked(f"the dumps hold no calls {_ENLARGE}")]
    is_counted = not any(dump.num_entries for dump in read.dumps)
    if is_counted and any(dump.is_open_elsewhere for dump in read.dumps):
        return [hangs_not_checked(f"calls of several groups are in flight, and the dumps hold none {_ENLARGE}")]
    hang = _hang(world)
    if hang is None and is_counted:
        return [*_absent(world), hangs_partly_checked(f"the dumps hold no calls, only their numbers {_ENLARGE}")]
    if hang is None:
        return _absent(world)
    if is_counted:
        summary = f"{hang.summary} The dumps hold no calls, only the call numbers of the default group."
        hang = replace(hang, status="suspect", summary=summary)
    hang = with_stuck_device(hang, world)
    if hang.cause == "not_seen":
        hang = _before_unseen(world) or hang
    if hang.cause == "not_seen":
        missing = [rank for rank in evidence_of(hang)["unseen_ranks"] if rank in world.rows.undumped]
        where = hang.evidence.get("op", "a collective")
        unsure = f"whether {ranks_text(missing)} entered {where} is unknown without a dump"
        return [_lost(world, missing, hang), hangs_partly_checked(unsure)]
    return [with_calls_of_each(hang, world), *_absent(world)]


def _before_unseen(world: DumpedWorld) -> Finding | None:
    """For each rank, judge only the calls before its first call that may wait for a rank without a dump.

    Calls run in order on a device, so if one of these hangs, the missing dumps are not needed.
    """
    graph, ranks = WaitGraph(world.view), {}
    for rank, view in world.view.ranks.items():
        in_order = sorted(view.calls, key=lambda call: call.issue_ns)
        free = tuple(itertools.takewhile(lambda c: world.view.elsewhere.isdisjoint(graph.targets([c])), in_order))
        ranks[rank] = replace(view, calls=free)
    found = _hang(replace(world, view=replace(world.view, ranks=ranks)))
    if found is None or found.cause == "not_seen":
        return None
    return with_stuck_device(replace(found, status="suspect"), world)


def _hang(world: DumpedWorld) -> Finding | None:
    """Judge the dumps by the hang analyzer of recorded runs."""
    blame = find_culprits(world.view)
    if blame.cause == "busy":
        return None  # no rank waits in a call
    certain = blame.cause.startswith("mismatch") or bool(world.rows.timed_out)
    reference_ns = max(world.reference_ns, world.view.last_ns + 1)
    policies = [StallPolicy()] + ([StallPolicy(floor_s=0.0)] if certain or not world.clock_is_known else [])
    log = EventLog([])
    judged = (hang_of_attempt(world.view, log, p, is_last=True, now_ns=reference_ns) for p in policies)
    found = next((finding for finding in judged if finding), None)
    if found is None:
        return None
    evidence = dict(found.evidence) | {
        "ranks_without_dump": list(world.rows.undumped[:MAX_LISTED]),
        "ranks_that_lost_records": list(world.rows.dropped)[:MAX_LISTED],
        "timed_out_ranks": list(world.rows.timed_out[:MAX_LISTED]),
    }
    if not world.clock_is_known:
        evidence |= {"silent_s": None, "limit_s": None}
        found = replace(found, cost_s=None)
    doubts = []
    if _skewed(world, found):
        evidence["dumps_apart_s"] = round(_apart_s(world), 1)
        doubts.append("The dump of the named rank is older than that call: dump all ranks at the same time.")
    elif not certain and not world.clock_is_known:
        doubts.append("The duration is unknown: the files' modification times are not the times of the dumps.")
    if found.cause == "all_entered" and blame.call is not None and blame.call.host_only:
        doubts.append("These dumps do not show which devices started it: TORCH_NCCL_ENABLE_TIMING=1 records that.")
    if found.cause == "all_entered" and found.evidence.get("process_group") in world.rows.unlisted:
        doubts.append(
            "A rank without a dump may not have entered the call: these dumps do not list the members of the group."
        )
    status: Status = "suspect" if doubts else "fired"
    return replace(found, status=status, attempt=None, evidence=evidence, summary=" ".join([found.summary, *doubts]))


def _skewed(world: DumpedWorld, hang: Finding) -> bool:
    """Return True if the culprits were dumped before the others made the call: they may have entered it afterwards."""
    if hang.cause not in ("not_entered", "p2p_unmatched", "order_inversion"):
        return False
    place = (hang.evidence.get("process_group"), hang.evidence.get("seq"))
    calls = [call for view in world.view.ranks.values() for call in view.calls]
    issued = [call.issue_ns for call in calls if (call.group, call.seq) == place]
    dumped = [world.rows.dumped_ns[rank] for rank in hang.ranks if rank in world.rows.dumped_ns]
    return bool(issued and dumped) and max(dumped) < min(issued)


def _apart_s(world: DumpedWorld) -> float:
    return (max(world.rows.dumped_ns.values()) - min(world.rows.dumped_ns.values())) / 1e9


def _lost(world: DumpedWorld, missing: Sequence[int], hang: Finding) -> Finding:
    many = len(missing) > 1
    facts = evidence_of(hang)
    call = f" in {facts['op']} #{facts['seq']} (group {facts['process_group']})" if "op" in facts else ""
    waiting = list(facts.get("waiting_ranks") or ())
    they, them = ("They", "them") if many else ("It", "it")
    return Finding(
        analyzer="hang",
        kind="rank_lost",
        severity="critical",
        status="suspect",
        ranks=tuple(missing),
        cause="no_dump",
        summary=f"{sentence(ranks_text(missing))[:-1]} left no dump, and {ranks_text(waiting)} "
        f"wait{'s' * (len(waiting) == 1)} for {them}{call}. {they} died before writing one, or the file was not "
        "collected.",
        evidence={**hang.evidence, "message": "no dump", "victims": []},
        advice="rank-lost-no_dump",
        cost_s=hang.cost_s,
    )


def _absent(world: DumpedWorld) -> list[Finding]:
    """Report ranks without a dump, if there are any."""
    absent = world.rows.undumped
    if not absent:
        return []
    return [hangs_partly_checked(f"there is no dump of {ranks_text(absent)}")]


def _facts(read: _Dumps) -> dict[str, Any]:
    dumps, world = read.dumps, read.world
    facts: dict[str, Any] = {
        "num_ranks": len(dumps),
        "ended": "not in the dumps",
        "dumps": {
            "versions": sorted({dump.version for dump in dumps}),
            "entries": sum(dump.num_entries for dump in dumps),
            "ranks_without_dump": list(world.rows.undumped[:1000]) if world else [],
        },
    }
    if world is not None:
        worst = sorted(world.rows.dropped.items(), key=lambda item: -item[1])
        facts["dropped_records"] = {f"of rank {rank}": count for rank, count in worst[:8]}
        if len(worst) > 8:
            facts["dropped_records"][f"of {len(worst) - 8} more ranks"] = sum(count for _, count in worst[8:])
    return facts


hangs_not_checked = partial(Finding.not_judged, "hang", "hang", "Hangs were not checked")
hangs_partly_checked = partial(Finding.not_judged, "hang", "hang", "Hangs were not fully checked", in_part=True)
FILES = FileAnalysis(format="flight_recorder", kind="hang", read=_read, run=hangs_of_dumps, facts=_facts)
