"""Ends of the ranks of an attempt: root causes, separated from ranks that died because of another rank.

    deaths = find_deaths(view, log)
    roots = [death for death in deaths if not death.collateral]

1. Deaths are gathered from the launcher (`rank_exit`), the rank itself (`exception`) and `watch` (`rank_state` dead).
2. An exception is collateral only if a process group's backend or its store raised it, and it reports a lost connection
   or peer. The exception's type is the strongest evidence: a backend raises RuntimeError or an error of
   torch.distributed, never ConnectionResetError. Next are the source file that the message names, the innermost frame,
   and whether the rank was inside a collective. In a chain of exceptions, the last one or its explicit cause is judged.
   If another rank died earlier for a reason of its own, one such exception anywhere in the chain is enough.
3. An error inside a collective after another rank's death is collateral, whatever its message, unless another rank
   raised the same error.
4. SIGABRT of a rank with calls on its device is collateral if another rank had already died of something else: NCCL's
   watchdog aborts when a peer is gone.
5. An end without an error is collateral if any other rank has a cause, if the launcher stopped the rank, or if all
   ranks ended in this way. An end by SIGTERM is also collateral, since another process sent it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from analyzers.run.calls.snapshot import AttemptView
from analyzers.run.ends.exceptions import Frame, Link, own_frame, read_traceback
from analyzers.run.records.event_log import Event, EventLog
from probes.tape import event_kinds

__all__ = ["Death", "DeathCause", "all_exited_with_zero", "find_deaths", "stopped_ranks"]

LOST_PEER = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|closed by (the )?(peer|remote)|time(d[ -]?)?[ -]?out"
    r"|broken pipe|remote ?error|remote (process|server)|pair closure|heartbeat|terminat|SIGTERM|aborted by"
    r"|peer (is )?(gone|closed)|connectFullMesh failed|got 0 bytes|SignalException",
    re.IGNORECASE,
)
"""Messages with which a backend reports that a peer is gone or unresponsive. Other errors of a backend (CUDA, memory)
are the rank's own."""
BACKENDS_SOURCE = re.compile(
    r"\bgloo\b|\b(pair|buffer|unbound_buffer|context)\.cc:\d|\bc10d\b|ProcessGroup[A-Z]\w+|\bNCCL\b|\bnccl[A-Z]|WorkNCCL"
    r"|TCPStore|key-value store|monitoredBarrier|Watchdog caught|socket\.cpp|ms for (recv|send) operation"
)
"""Names of the source files and classes of torch.distributed's backends and store in their errors."""
STORE = re.compile(r"TCPStore|key-value store")
STORE_CLOSED = re.compile(
    r"broken pipe|connection (was )?(likely )?(closed|reset|refused)|got 0 bytes|remote server|failed to (recv|send)",
    re.IGNORECASE,
)
OUT_OF_MEMORY = re.compile(
    r"MemoryError|OutOfMemoryError|out of memory|can't allocate memory|cannot allocate memory|bad_alloc"
    r"|\bCU[A-Z]+_[A-Z_]*ALLOC(ATION)?_FAILED",
    re.IGNORECASE,
)
"""Errors of a device or a host without free memory; CUDA's libraries have separate codes for it."""
_BACKENDS_TYPES = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "SignalException")
_UNNAMED_TYPES = ("RuntimeError", "Exception", "")
"""Types of a backend's errors, besides the types of torch.distributed. "Exception" and "" mean that the type was not
recorded."""
_MAKES_CALLS = re.compile(r"/torch/(?!utils/)")
"""Torch calls collectives in backward passes, hooks and wrappers; its data loader does not."""
_NAMED = re.compile(r"(?:[A-Za-z_][\w.]{0,200}\.)?([A-Z]\w{0,100}(?:Error|Exception))\b")
"""The exception's type at the start of the message in an error file."""
_EXIT_CODE = re.compile(r"exit code (-?\d{1,9})")
"""Message of a rank that ended with `sys.exit(3)`; a text passed to `sys.exit` is the message itself."""
_LOADER = re.compile(r"\bDataLoader\b")


DeathCause = Literal["exception", "signal", "out_of_memory", "exit", "vanished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of one rank."""

    rank: int
    when_ns: int
    cause: DeathCause
    signal: str = ""
    exit_code: int | None = None
    error_type: str = ""
    message: str = ""
    links: tuple[Link, ...] = ()
    """The chain of exceptions, the original one first; without a traceback one link without frames."""
    phase: str | None = None
    """Phase in which it raised its exception; "" outside of all, None if not recorded."""
    collateral: bool = False

    @property
    def origin(self) -> Link:
        """The exception to judge: the last of the chain, or its explicit cause."""
        i = len(self.links) - 1
        while i > 0 and self.links[i].is_caused:
            i -= 1
        return self.links[i] if self.links else Link(self.error_type, self.message)

    @property
    def shown(self) -> Link:
        """The exception to report: the last one of the chain that the user's code raised, or else `origin`."""
        of_user = (link for link in reversed(self.links) if any(not frame.is_library for frame in link.frames))
        return next(of_user, self.origin)

    @property
    def frame(self) -> Frame | None:
        """The line of the user's code that raised the exception; None if it is not recorded."""
        return own_frame(self.shown)

    @property
    def is_surely_backends(self) -> bool:
        """True if a backend or its store certainly raised every exception of its chain."""
        return bool(self.links) and all(_is_backends(link) for link in self.links)

    @property
    def is_from_outside(self) -> bool:
        """True for a signal by which a user or a scheduler ends a job."""
        return self.signal in ("SIGINT", "SIGTERM", "SIGHUP")

    @property
    def is_of_store(self) -> bool:
        """True if the exception reports a closed connection to the rendezvous store."""
        found = self.origin
        names_store = _is_backends(found) and STORE.search(found.message) is not None
        of_store = names_store or found.error_type in ("DistNetworkError", "DistStoreError")
        return of_store and STORE_CLOSED.search(found.message) is not None


def find_deaths(view: AttemptView, log: EventLog) -> list[Death]:
    """Every rank that died in the attempt, in order of time, with `collateral` set for consequences."""
    found: dict[int, Death] = {}
    for event in log.of(event_kinds.EXCEPTION, attempt=view.attempt):
        if event.rank >= 0 and event.rank not in found:
            found[event.rank] = _death_by_exception(event)
    failed = any(event.text("reason") == "failed" for event in log.of(event_kinds.RUN_ENDED))
    if not found and all_exited_with_zero(view, log):
        return []
    lost_a_peer = any(_is_consequence(death, view, earlier=True) for death in found.values())
    closed = {event.rank for event in log.of(event_kinds.RANK_CLOSED, attempt=view.attempt)}
    for event in log.of(event_kinds.RANK_EXIT, attempt=view.attempt):
        rank, name = event.integer("exit_rank"), event.text("signal")
        code = event.integer("exit_code", 0)
        if code == 0 and not name and rank in found and found[rank].cause == "exit":
            del found[rank]  # the rank caught its own call of `exit`, continued, and ended with code 0
        if rank in found or rank < 0:
            continue
        is_closed = not name and rank in closed
        if is_closed and not (lost_a_peer if code == 0 else failed):
            # The rank closed its recording, so its end was orderly. With code 0 this is a death only if other ranks
            # lost a peer: the rank left while they still trained. A nonzero code only reports how the run ended (for
            # example, that recovery gave up), and is a death only if the run failed.
            continue
        exhausted = event.text("out_of_memory")
        cause: DeathCause = "out_of_memory" if exhausted else "signal" if name else "exit"
        message = f"killed by the kernel: {exhausted} exhausted" if exhausted else event.text("message")
        named = _NAMED.match(message)
        found[rank] = Death(rank=rank, when_ns=event.wall_ns, cause=cause, signal=name, exit_code=code, message=message,
                            phase="", links=(Link(named[1] if named else "", message),))  # fmt: skip
    for event in log.of(event_kinds.RANK_STATE, attempt=view.attempt):
        rank = event.integer("state_rank")
        if event.text("state") == "dead" and rank in view.ranks and rank not in found and rank not in closed:
            found[rank] = Death(rank=rank, when_ns=event.wall_ns, cause="vanished")
    deaths = sorted(found.values(), key=lambda death: (death.when_ns, death.rank))
    # `watch` also sees processes that the agent ended, so an end without an error counts only if no other rank has a
    # cause.
    reasons = [death for death in deaths if death.cause != "vanished" and not _is_consequence(death, view)]
    all_vanished = sum(death.cause == "vanished" for death in deaths) == len(view.ranks)
    accounted = view.ranks.keys() if all_vanished else stopped_ranks(view, log)
    return [replace(death, collateral=_is_collateral(death, reasons, view, accounted)) for death in deaths]


def all_exited_with_zero(view: AttemptView, log: EventLog) -> bool:
    """Return True if every rank of the world exited with code 0, so that none was lost."""
    exits = log.of(event_kinds.RANK_EXIT, attempt=view.attempt)
    clean = {
        event.integer("exit_rank") for event in exits if not event.text("signal") and event.integer("exit_code") == 0
    }
    return len(clean) == len(exits) and 0 < view.world_size <= len(clean)


def _death_by_exception(event: Event) -> Death:
    """The death by an exception or exit that the rank itself recorded."""
    links = _links(event)
    phase = event.text("phase") if "phase" in event.detail else None
    death = Death(rank=event.rank, when_ns=event.wall_ns, cause="exception", links=links, phase=phase)
    error_type, message = death.shown.error_type or event.text("type", "Exception"), death.shown.message
    if error_type == "SystemExit" or event.text("type") == "SystemExit":
        code = _EXIT_CODE.fullmatch(event.text("message"))
        text = "" if code else event.text("message")
        return replace(death, cause="exit", exit_code=int(code[1]) if code else 1, message=text)
    exhausted = OUT_OF_MEMORY.search(f"{event.text('type')}: {event.text('message')}")
    cause: DeathCause = "out_of_memory" if exhausted else "exception"
    return replace(death, cause=cause, error_type=error_type, message=message)


def stopped_ranks(view: AttemptView, log: EventLog) -> set[int]:
    """Ranks that a launcher is known to have ended because of others."""
    return {event.integer("exit_rank") for event in log.of(event_kinds.RANK_STOPPED, attempt=view.attempt)}


def _is_collateral(death: Death, reasons: Sequence[Death], view: AttemptView, accounted: Set[int]) -> bool:
    """Return True for a consequence. `reasons`: deaths with a cause, in order of time; `accounted`: ranks that ended
    without an error for a known reason."""
    if death.cause == "vanished":
        return bool(reasons) or death.rank in accounted
    if death.signal == "SIGABRT" and _is_on_device(death, view):
        # NCCL's watchdog aborts a process whose peer is gone: the fault is not in this rank or its device.
        return any(r.when_ns <= death.when_ns and r.signal != "SIGABRT" for r in reasons if r.rank != death.rank)
    if death.signal and death.signal != "SIGTERM":
        return False
    first = next((reason for reason in reasons if reason.rank != death.rank), None)
    # The launcher notices that a signal killed a rank only after the rank's peers have reported errors.
    by_signal = first is not None and any(reason.signal for reason in reasons if reason.rank != death.rank)
    earlier = first is not None and (first.when_ns <= death.when_ns or by_signal)
    # All ranks may raise the same error, for example if the gradient norm is NaN on each.
    interrupted = _in_call(death, view) and earlier and not any(_is_same(death, reason) for reason in reasons)
    return _is_consequence(death, view, earlier) or interrupted


def _is_same(one: Death, other: Death) -> bool:
    """Return True if two ranks raised the same error."""
    are_two = one.rank != other.rank and one.cause == other.cause == "exception"
    return are_two and (one.error_type, one.message) == (other.error_type, other.message)


def _links(event: Event) -> tuple[Link, ...]:
    """The chain of an `exception` event. The last link has the event's message, since the traceback may be cut."""
    recorded = Link(event.text("type", "Exception"), event.text("message"))
    links = read_traceback(event.text("traceback"), event.text("package"))
    return (
        (*links[:-1], replace(links[-1], error_type=recorded.error_type, message=recorded.message))
        if links
        else (recorded,)
    )


def _is_consequence(death: Death, view: AttemptView, earlier: bool = False) -> bool:
    """Return True if the rank died because it lost a peer. `earlier`: another rank had died for another reason
    before.
    """
    if death.signal:
        return death.signal == "SIGTERM"
    if death.cause not in ("exception", "exit"):
        return False
    judged = death.links if earlier else (death.origin,)
    certain = any(_is_backends(link) and _names_lost_peer(link) for link in judged)
    likely = (earlier or _in_call(death, view)) and _names_lost_peer(death.origin) and _may_be_backends(death.origin)
    return certain or likely


def _names_lost_peer(link: Link) -> bool:
    return LOST_PEER.search(f"{link.error_type} {link.message}") is not None


def _is_backends(link: Link) -> bool:
    """Return True if a process group's backend or its store certainly raised it."""
    if link.error_type in _BACKENDS_TYPES:
        return True
    return link.error_type in _UNNAMED_TYPES and BACKENDS_SOURCE.search(link.message) is not None


def _may_be_backends(link: Link) -> bool:
    """Return True if a backend may have raised the exception. This is so if its type is generic, and its innermost
    frame is in user code or in library code that makes collectives."""
    if link.error_type not in _UNNAMED_TYPES or _LOADER.search(link.message):
        return False
    innermost = link.frames[-1] if link.frames else None
    return innermost is None or not innermost.is_library or _MAKES_CALLS.search(innermost.path) is not None


def _in_call(death: Death, view: AttemptView) -> bool:
    return death.rank in view.ranks and bool(view.ranks[death.rank].calls)


def _is_on_device(death: Death, view: AttemptView) -> bool:
    """Return True if the rank had calls on its device, started or queued."""
    of_rank = view.ranks.get(death.rank)
    if of_rank is not None and any(call.on_device for call in of_rank.calls):
        return True
    return any(rank == death.rank for _, rank in view.queued) or any(rank == death.rank for rank, *_ in view.queued_p2p)
