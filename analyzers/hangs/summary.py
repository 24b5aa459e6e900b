"""Summary of a hang: the culprit and its place, then the ranks that waited."""

from __future__ import annotations

from analyzers.hangs.culprits import HangCause
from analyzers.run.snapshot import AttemptView
from analyzers.wording import ranks_text, sentence

__all__ = ["hang_summary"]

_NAMES_CALL = (
    "finished",
    "not_entered",
    "device_stuck",
    "p2p_unmatched",
    "mismatch_dtype",
    "mismatch_size",
    "skipped",
    "all_entered",
)
"""Causes whose first sentence names the call that the others wait in."""


def hang_summary(view: AttemptView, found: HangCause, step: int | None, silent_s: float, frame: str) -> str:
    """Two sentences. `frame`: innermost frame of the culprit's stack, or empty."""
    many, seconds = len(found.culprits) > 1, f"{round(silent_s, 1 if silent_s < 100 else None):g}"
    who = ranks_text(found.culprits)
    call = found.call.text if found.call else "a collective"
    first = view.ranks.get(found.culprits[0]) if found.culprits else None
    doing = first.doing if first is not None else "at an unknown place (no records of the rank)"
    at = "" if step is None else f" at step {step}"  # dumps of other runs know no steps
    where = f" at {frame}" if frame else ""
    sides = " against ".join(f"{what} on {ranks_text(ranks)}" for what, ranks in found.differs.items())
    stuck = f"{at}: stuck {doing}{where}"
    verb = "hang" if many else "hangs"
    text = {
        "finished": f"{who} finished and closed{at} while other ranks still wait in {call}",
        "stopped": f"{who} {'are' if many else 'is'} stopped{at} "
        f"(process state {(first.os_state if first else '') or 'T'}), {doing}",
        "data": f"{who} {verb} in the data loader{at}{f', in {frame}' if frame else ''}",
        "checkpoint": f"{who} {verb} writing a checkpoint{at}{f', in {frame}' if frame else ''}",
        "evaluate": f"{who} {verb} in evaluation{at}{f', in {frame}' if frame else ''}",
        "not_entered": f"{who} did not reach {call}{stuck}",
        "device_stuck": f"{'the devices of ' * many}{who if many else 'the device of ' + who}"
        f" {'are' if many else 'is'} stuck{at}: {_stuck_call(view, found, call)}",
        "gil": f"{who} {'do' if many else 'does'} not respond{at}: asleep in native code that holds Python's lock "
        f"(GIL), {doing}{where}",
        "p2p_unmatched": f"{who} did not answer {_unanswered(found, call)}{stuck}",
        "mismatch_operation": f"different collectives at the same place{at}: {sides}",
        "skipped": f"{who} skipped {call}{at} and {'are' if many else 'is'} ahead of the others"
        + (f": {sides}" if sides else ""),
        "mismatch_dtype": f"different element types in {call}{at}: {sides}",
        "mismatch_size": f"different sizes in {call}{at}: {sides}",
        "order_inversion": f"ranks entered process groups in opposite order{at}: "
        + ", ".join(
            f"rank {one} waits for rank {other}"
            for one, other in zip(found.cycle, (*found.cycle[1:], *found.cycle[:1]), strict=True)
        ),
        "all_entered": f"{who} entered {call}{at} and none returned: the network or the backend is stuck",
        "busy": f"{who} {'make' if many else 'makes'} no progress{at} outside of any collective: {doing}{where}",
    }.get(found.cause, f"{who}: {found.cause}{at}")
    if not found.waiting:
        return f"{sentence(text)} No records for {seconds} s."
    where_waiting = "" if found.cause in _NAMES_CALL else f" in {call}"
    return f"{sentence(text)} {sentence(ranks_text(found.waiting))[:-1]} waited{where_waiting} for {seconds} s."


def _unanswered(found: HangCause, call: str) -> str:
    """The call; without its peer where the culprit is that: "rank 0 did not answer recv #234"."""
    if found.call is not None and found.call.is_p2p and found.call.peer in found.culprits:
        return f"{found.call.op} #{found.call.seq}"
    return call


def _stuck_call(view: AttemptView, found: HangCause, call: str) -> str:
    """Description of the call that a device never started, or never finished."""
    own = view.ranks.get(found.culprits[0])
    is_in_it = own is not None and found.call is not None and any(c.seq == found.call.seq for c in own.calls)
    verb = "finished" if is_in_it else "answered" if found.call is not None and found.call.is_p2p else "started"
    return f"it never {verb} {call}, although its host had enqueued that"
