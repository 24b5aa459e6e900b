"""Hangs: no rank makes progress. Names the rank that keeps the others waiting, and where they wait.

Live and post-mortem are one function: with `now_ns` the silence up to now counts, without it the silence up to the
first death (a kill by watch, a timeout of the others, the end of the launcher).

1. `stall` says whether the silence is longer than this run's limit in this phase.
2. `waitfor` names culprits apart from those who wait, from sequence numbers and calls in flight.
3. A mismatch of operation, dtype or size counts even without silence when a rank aborted in it: gloo does so.
   It also counts where the records end without a word; so does a stopped process.
4. What the culprits' devices and hosts say about it is joined (`silent_device`).
5. The stacks of all ranks are told in groups (`stacks_at_hang`), whoever differs from its like first.
6. Dead ranks are `rank_lost`; here are only processes that live and stand still.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from analyzers.deaths.analyze import restart
from analyzers.finding import Finding
from analyzers.hangs.device_evidence import with_devices
from analyzers.hangs.stacks import read_stack
from analyzers.hangs.stacks_at_hang import StacksAtHang, roles_of
from analyzers.hangs.wait_for import Blame, find_culprits
from analyzers.run.endings import find_deaths
from analyzers.run.event_log import EventLog
from analyzers.run.snapshot import SNAPSHOT_EVENTS, AttemptView, attempts, take_snapshot
from analyzers.run.stall_limits import (
    StallPolicy,
    death_ns,
    ended_cleanly,
    killed_by_watch,
    limit_s,
    stalled_s,
    watched_ns,
)
from analyzers.source import Source, missing_tables

__all__ = ["analyze", "explain"]


def analyze(
    source: Source, policy: StallPolicy | None = None, now_ns: int | None = None, stacks_dir: Path | None = None
) -> list[Finding]:
    """Findings of kind `hang`, at most one an attempt. `now_ns` (epoch) only while the run is alive."""
    policy = policy or StallPolicy()
    lost = missing_tables(source, "ranks", "steps", "collectives")
    if lost and (lost != ["collectives"] or source.rows("SELECT 1 FROM ranks WHERE world_size > 1 LIMIT 1")):
        return [_insufficient(f"nothing in {', '.join(lost)}")]
    log = EventLog.load(source, SNAPSHOT_EVENTS)
    lives = attempts(source)
    findings = []
    for attempt in lives:
        is_last = attempt == lives[-1]
        view = take_snapshot(source, attempt, log)
        again = "" if is_last else restart(source, attempt, lives)
        stacks = StacksAtHang(stacks_dir, roles_of(source, attempt)) if stacks_dir else None
        found = explain(view, log, policy, is_last=is_last, now_ns=now_ns if is_last else None, again=again,
                        stacks=stacks)  # fmt: skip
        findings += [with_devices(source, found, view.last_ns)] if found else []
    return findings


def explain(
    view: AttemptView,
    log: EventLog,
    policy: StallPolicy,
    *,
    is_last: bool,
    now_ns: int | None = None,
    again: str = "",
    stacks: StacksAtHang | None = None,
) -> Finding | None:
    """The hang of one attempt, if there is one."""
    if not view.ranks or (is_last and ended_cleanly(view, log, policy)):
        return None
    deaths = find_deaths(view, log)
    by_watch = killed_by_watch(log, view.attempt)
    sudden = [d for d in deaths if not d.collateral and d.cause in ("signal", "exception", "exit")]
    blame = find_culprits(view)
    aborted = any(death.signal == "SIGABRT" for death in deaths) and blame.is_mismatch
    if sudden and not by_watch and not aborted:
        return None
    if deaths and now_ns is not None and not by_watch and not aborted:
        return None
    seen_ns = watched_ns(view, log)
    said_ns = death_ns(view, log) or now_ns or seen_ns
    if said_ns is None and not (blame.is_proof or blame.cause == "finished"):
        return None  # nobody says how long the silence was: a run that was killed looks the same
    reference_ns = said_ns or view.last_ns
    silent_s = stalled_s(view, reference_ns, policy)
    if silent_s is None and not aborted and not by_watch and said_ns is not None and said_ns != seen_ns:
        return None
    silent_s = max(0.0, (reference_ns - view.last_ns) / 1e9)
    found = _finding(view, blame, silent_s, limit_s(view, policy), again, _of_culprits(view, blame, stacks))
    groups = stacks.of(view, blame.culprits) if stacks else []
    return replace(found, evidence={**found.evidence, "stack_groups": groups}) if groups else found


def _of_culprits(view: AttemptView, blame: Blame, stacks: StacksAtHang | None) -> dict[int, list[str]]:
    return {rank: read_stack(stacks.folder, view.attempt, rank) for rank in blame.culprits[:8]} if stacks else {}


def _finding(
    view: AttemptView, blame: Blame, silent_s: float, limit: float, again: str, stacks: Mapping[int, list[str]]
) -> Finding:
    first = view.ranks.get(blame.culprits[0]) if blame.culprits else None
    step = (blame.call.step if blame.call and blame.call.step is not None else None) or (first.step if first else None)
    evidence: dict[str, Any] = {
        "silent_s": round(silent_s, 1),
        "limit_s": round(limit, 1),
        "waiting_ranks": list(blame.waiting),
        "doing": {str(rank): view.ranks[rank].doing for rank in blame.culprits[:16] if rank in view.ranks},
    }
    if blame.call is not None:
        evidence |= {
            "op": blame.call.op,
            "process_group": blame.call.group,
            "seq": blame.call.seq,
            "bytes": blame.call.num_bytes,
            "caller": blame.call.caller,
        }
        evidence["last_seq_of_culprits"] = {
            str(rank): view.last_seq.get((blame.call.group, rank)) for rank in blame.culprits[:16]
        }
    if blame.cycle:
        evidence["cycle"] = list(blame.cycle)
    if blame.differs:
        evidence["differs"] = {what: list(ranks) for what, ranks in blame.differs.items()}
    frames = {str(rank): lines for rank, lines in stacks.items() if lines}
    if frames:
        evidence["stacks"] = frames
    return Finding(
        analyzer="hang",
        kind="hang",
        severity="warning" if again else "critical",
        status="fired",
        ranks=blame.culprits,
        first_step=step,
        last_step=step,
        cause=blame.cause,
        summary=_summary(view, blame, step, silent_s, stacks) + again,
        evidence=evidence,
        advice=f"hang-{blame.cause}",
        attempt=view.attempt,
        cost_s=round(silent_s, 1),
    )


def _summary(
    view: AttemptView, blame: Blame, step: int | None, silent_s: float, stacks: Mapping[int, list[str]]
) -> str:
    who = f"rank{'s' if len(blame.culprits) > 1 else ''} {_listed(blame.culprits)}"
    call = f" {blame.call.text}" if blame.call else " a collective"
    first = view.ranks.get(blame.culprits[0]) if blame.culprits else None
    doing = first.doing if first is not None else "nothing is recorded of it here"
    state = first.os_state if first is not None else ""
    frame = next((f" at {lines[0]}" for lines in stacks.values() if lines), "")
    waits = (
        f"rank{'s' if len(blame.waiting) > 1 else ''} {_listed(blame.waiting)} wait{'s' * (len(blame.waiting) == 1)}"
    )
    # The call stands in the text already.
    named = blame.cause in ("finished", "not_entered", "p2p_unmatched", "mismatch_dtype", "mismatch_size", "skipped")
    where = "" if named else f" in{call}"
    waiting = f"; {waits}{where} for {silent_s:.0f} s" if blame.waiting else f"; silent for {silent_s:.0f} s"
    kinds = " against ".join(f"{what} on {_listed(ranks)}" for what, ranks in blame.differs.items())
    many = len(blame.culprits) > 1
    text = {
        "finished": f"{who} came to {'their' if many else 'its'} end and closed, and the others go on:{call}",
        "stopped": f"{who} {'are' if many else 'is'} stopped (process state {state or 'T'}), {doing}",
        "data": f"{who} {'hang' if many else 'hangs'} in the data loader{frame}",
        "checkpoint": f"{who} {'hang' if many else 'hangs'} writing a checkpoint{frame}",
        "evaluate": f"{who} {'hang' if many else 'hangs'} in evaluation{frame}",
        "not_entered": f"{who} never entered{call}: {doing}{frame}",
        "gil": f"{who} {'are' if many else 'is'} alive, but {'their' if many else 'its'} interpreter does not answer: "
        f"asleep in C with Python's lock (GIL) held, {doing}{frame}",
        "p2p_unmatched": f"{who} never answered{call}: {doing}{frame}",
        "mismatch_operation": f"different collectives at the same place: {kinds} ({blame.call and blame.call.group})",
        "skipped": f"{who} left out{call} and {'are' if many else 'is'} ahead of the others"
        + (f": {kinds}" if kinds else ""),
        "mismatch_dtype": f"different element types in{call}: {kinds}",
        "mismatch_size": f"different sizes in{call}: {kinds}",
        "order_inversion": "groups are taken in opposite order: rank "
        + " waits for rank ".join(map(str, (*blame.cycle, *blame.cycle[:1]))),
        "all_entered": f"{who} entered{call} and nobody left: the network or the backend is stuck",
        "busy": f"{who} {'make' if many else 'makes'} no progress and {'are' if many else 'is'} in no collective: "
        f"{doing}{frame}",
    }.get(blame.cause, f"{who} {blame.cause}")
    at = "" if step is None else f" (step {step})"  # dumps of other runs know no steps
    return f"{text}{at}{waiting}"


def _listed(ranks: tuple[int, ...]) -> str:
    """Ranks for a sentence: 0, 2, 3 or 0-1022 (1023)."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, {ranks[2]}, ... {ranks[-1]} ({len(ranks)} ranks)"


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("hang", "hang", f"hangs were not looked for: {why}")
