"""Summary of a hang: the culprit and its place, then the ranks that waited."""

from __future__ import annotations

from dataclasses import replace

from analyzers.causes import CAUSES
from analyzers.finding import Finding
from analyzers.hangs.culprits import HangCause
from analyzers.hangs.stacks import is_library
from analyzers.hangs.wait_graph import WaitGraph
from analyzers.hangs.waiting_calls import waiting_calls
from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.wording import is_number, number, ranks_text, sentence

__all__ = ["SO_FAR", "behind_step", "hang_summary", "lasting"]

SO_FAR = " so far"
"""Text after the length of an ongoing silence."""
SHORTEST_S = 0.05
"""Silences below this would be printed as 0, so they are left out like unknown ones."""
MAX_CYCLE = 3
"""Maximum number of ranks in a cycle for which the calls are named."""
_THIRD_PERSON = {"are": "is", "do": "does", "hang": "hangs", "have": "has", "make": "makes"}
"""Verbs of the sentences in `causes`, for one rank."""


def hang_summary(view: AttemptView, found: HangCause, step: int | None, silent_s: float, frame: str) -> str:
    """Two or three sentences. `frame`: innermost frame of the culprit's stack, or empty."""
    many, lasted = len(found.culprits) > 1, f" for {number(round(silent_s, 1), 4)} s" if silent_s >= SHORTEST_S else ""
    who = ranks_text(found.culprits)
    call = found.call.text if found.call else "a collective"
    first = view.ranks.get(found.culprits[0]) if found.culprits else None
    doing = _activity(first, frame) if first is not None else "at an unknown place (no records of the rank)"
    at = "" if step is None else f" at step {step}"  # dumps of runs that Rankscope did not record contain no steps
    if found.unseen:
        awaited = f"{call}{at} waits for {ranks_text(found.unseen)}, of which there are no records here"
        return f"{sentence(awaited)} {_waits(view, found, lasted)}"
    where = f" at {frame}" if frame else ""
    sides = " against ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in found.differs.items())
    behind = behind_step(view, found)
    stuck = f"{at}: stuck {doing}{'' if behind is None else f' of step {behind}'}{where}"
    template = CAUSES[found.cause].record_text if found.cause in CAUSES else ""
    if behind is not None and template and not CAUSES[found.cause].names_call:
        at = f" at step {behind}"
    text = (template or f"{who}: {found.cause}{at}").format(
        who=who,
        call=call,
        at=at,
        where=where,
        inside=f", in {frame}" if frame else "",
        doing=doing,
        stuck=stuck,
        sides=sides,
        sides_if_any=f": {sides}" if sides else "",
        os_state=(first.os_state if first else "") or "T",
        devices=f"the devices of {who}" if many else f"the device of {who}",
        stuck_call=_stuck_call(view, found, call) if found.cause == "device_stuck" else "",
        unmatched=f"wait for each other{at}: {_cycle(view, found)}"
        if found.cycle
        else f"did not answer {_unanswered(found, call)}{stuck}",
        cycle=", ".join(
            f"rank {one} waits for rank {other}"
            for one, other in zip(found.cycle, (*found.cycle[1:], *found.cycle[:1]), strict=True)
        ),
        entered=f"{_all_entered(found, who, call, at)}: {_all_entered_cause(found, many=many)}",
        **{verb: verb if many else third for verb, third in _THIRD_PERSON.items()},
    )
    if found.absent:
        state = view.ranks[found.absent[0]]
        absent = sentence(f"{ranks_text(found.absent)} did not reach it either: stuck {_activity(state, '')}")
        text = f"{sentence(text)} {absent}"
    if not found.waiting:
        return f"{sentence(text)} No records{lasted}." if lasted else sentence(text)
    return f"{sentence(text)} {_waits(view, found, lasted)}"


def behind_step(view: AttemptView, found: HangCause) -> int | None:
    """The culprit's step, if it is earlier than the step of the call in which the other ranks wait for it.

    After the optimizer the rank may already be in the next step, because in a loop without a loader the start of a step
    is not recorded.
    """
    first = view.ranks.get(found.culprits[0]) if found.culprits else None
    if first is None or found.call is None or None in (first.step, found.call.step):
        return None
    is_in_step = first.step_is_open and (first.phases or first.last_phase in ("forward", "backward"))
    return first.step if is_in_step and first.step < found.call.step else None  # type: ignore[operator]


def lasting(finding: Finding, silent_s: float) -> Finding:
    """A hang that was reported earlier and is still ongoing, with the silence up to now."""
    reported_s = finding.evidence.get("silent_s")
    if finding.kind != "hang" or not is_number(reported_s) or silent_s <= reported_s:  # type: ignore[operator]
        return finding
    before, now = (f" for {number(round(seconds, 1), 4)} s" for seconds in (float(reported_s), silent_s))  # type: ignore[arg-type]
    evidence = {**finding.evidence, "silent_s": round(silent_s, 1)}
    return replace(finding, summary=finding.summary.replace(before, f"{now}{SO_FAR}"), evidence=evidence)


def _waits(view: AttemptView, found: HangCause, lasted: str) -> str:
    """Text on the ranks that waited and their calls: first the ranks in the call of the first sentence, then the
    others."""
    calls = waiting_calls(view, found)
    named = found.call.text if found.call else ""
    others = {text: ranks for text, ranks in calls.items() if text != named}
    elsewhere = sorted(rank for ranks in others.values() for rank in ranks)
    here = [rank for rank in found.waiting if rank not in set(elsewhere)]
    other = next(iter(others)) if len(others) == 1 else "other calls"
    if not here:
        return sentence(f"{ranks_text(elsewhere)} waited in {other}{lasted}")
    where = f" in {named or 'a collective'}"
    if found.cause in CAUSES and CAUSES[found.cause].names_call and not found.cycle:
        where = " in that call" if elsewhere else ""
    rest = f", and {ranks_text(elsewhere)} in {other}" if elsewhere else ""
    return sentence(f"{ranks_text(here)} waited{where}{lasted}{rest}")


def _cycle(view: AttemptView, found: HangCause) -> str:
    """The calls of ranks that wait for each other: "rank 0 in send #5 to rank 1, rank 1 in send #5 to rank 0"."""
    graph, shown = WaitGraph(view), found.cycle[:MAX_CYCLE]
    parts = []
    for rank, awaited in zip(shown, (*found.cycle[1:], found.cycle[0]), strict=False):
        heads = graph.heads(view.ranks[rank]) if rank in view.ranks else []
        calls = [call for call in heads if call.is_p2p and call.peer == awaited] or heads
        parts.append(f"rank {rank} in {calls[0].text}" if calls else f"rank {rank}")
    rest = len(found.cycle) - len(shown)
    return ", ".join(parts) + (f" and {rest} more" if rest else "")


def _activity(state: RankView, frame: str) -> str:
    """What a rank is doing: its phase; without a phase, the call that it is in; otherwise its user code, if no library
    is on top of the stack."""
    if state.phases:
        return state.doing
    if calls := [call for call in state.calls if not state.may_have_left(call)]:
        return f"in {calls[0].text}"
    return "in a library call" if is_library(frame) else state.doing


def _unanswered(found: HangCause, call: str) -> str:
    """The call, without its peer if the peer is the culprit: "rank 0 did not answer recv #234"."""
    if found.call is not None and found.call.is_p2p and found.call.peer in found.culprits:
        return f"{found.call.op} #{found.call.seq}"
    return call


def _all_entered(found: HangCause, who: str, call: str, at: str) -> str:
    """Name the ranks that entered the call that does not end; for a message, both ends of its link."""
    if found.call is not None and found.call.is_p2p:
        return f"{call} on rank {found.call.rank}{at} does not return, and both ends of the link have entered it"
    return f"{who} entered {call}{at} and none returned"


def _all_entered_cause(found: HangCause, *, many: bool) -> str:
    """Possible causes of a call that all entered and none left; also a device, if only hosts surely entered it."""
    if found.call is None or not found.call.host_only:
        return "the network or the backend is stuck"
    device = "the device of one of them" if many else "its device"
    return f"the network or the backend is stuck, or {device} is stuck in an earlier kernel"


def _stuck_call(view: AttemptView, found: HangCause, call: str) -> str:
    """Describe the call that a device never started or never finished, and how far its host is ahead."""
    many = len(found.culprits) > 1
    it, its_host = ("they", "their hosts") if many else ("it", "its host")
    state = view.ranks.get(found.culprits[0])
    if state is None or found.call is None:
        return f"{it} never started {call}, although {its_host} had enqueued it"
    if any((c.group, c.seq) == (found.call.group, found.call.seq) for c in state.calls):
        return f"{it} never finished {call}, although {its_host} had enqueued it"
    ahead = f", although {its_host} {'are' if many else 'is'} at step {state.step}"
    is_ahead = not many and state.step is not None and found.call.step is not None and state.step > found.call.step
    if found.call.is_p2p and found.call.rank not in found.culprits:
        return f"{it} never answered {call}, although {its_host} had enqueued it"
    of_group = next((c for c in state.enqueued if c.group == found.call.group and not c.is_p2p), None)
    first = of_group or next(iter(state.enqueued), None)
    if first is None or (of_group is not None and of_group.seq <= found.call.seq):
        return f"{it} never started {call}{ahead if is_ahead else f', although {its_host} had enqueued it'}"
    return f"{it} never started {first.text}, although {its_host} had enqueued it"
