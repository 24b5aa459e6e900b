"""Causes named by log lines about collectives: mismatches, ranks that did not make a call, calls that did not end.

Ranks named by TORCH_DISTRIBUTED_DEBUG=DETAIL, torch's desync report and monitoredBarrier are proven; ranks named by
NCCL's RAS are suspects. gloo's timeouts name no call. If some ranks print a timeout and others do not, those others may
never have made the call, so they are suspects. Lines of NCCL's watchdogs are compared in `watchdogs`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from analyzers.hangs.logged.watchdogs import watchdog_candidates
from analyzers.hangs.mismatches import compare_calls, smaller_side
from analyzers.logs.candidate import Candidate, from_lines, named_by, ranks_of, who
from analyzers.logs.exceptions import is_victims, relevance
from analyzers.logs.log_events import LogBook
from analyzers.logs.policy import LogPolicy
from analyzers.run.calls.recorded_calls import Call
from analyzers.wording import ranks_text

__all__ = ["call_candidates"]

_TRACE_ERRORS = {
    "COLLECTIVE_TYPE_MISMATCH": "mismatch_operation", "SIZE_OR_SYNTAX_MISMATCH": "mismatch_size",
    "COLLECTIVE_DTYPE_MISMATCH": "mismatch_dtype",
}  # fmt: skip
"""Causes by the names of torch.distributed.flight_recorder's MatchState."""
_RANK_0_FIRST = re.compile(r"\bin (?:main_process_first|\w*(?:distributed|rank)_zero_first|rank0_first)\b")
"""Context managers of transformers, accelerate, ultralytics and others: all ranks but the first wait in them."""


def call_candidates(book: LogBook) -> list[Candidate]:
    """Candidates for every cause that lines about calls name."""
    found = [
        *_stated(book),
        *_stalled(book),
        *_first_calls(book),
        *_first_rank(book),
        *watchdog_candidates(book),
        *_stuck(book),
        *_timed_out(book),
    ]
    found += [*_trace_missing(book), *_tasks(book), *_quorum(book)]
    # Counts of calls that were printed while the job ran are weaker evidence than a call that timed out.
    return found or list(_ras(book)) or list(_unnumbered(book))


def _stated(book: LogBook) -> Iterator[Candidate]:
    yield from _detail(book)
    yield from _trace_culprits(book)
    lines = list(book.of("desync_not_joined", "monitored_barrier", "jax_barrier"))
    ranks = named_by(lines)
    if ranks:
        first = lines[0]
        call = f"collective {first.number('seq')}" if first.kind == "desync_not_joined" else "the barrier"
        yield from_lines(
            "not_entered",
            lines,
            rank_class="mismatch",
            ranks=ranks,
            what=f"{who(ranks)} did not reach {call}",
            why=first.quoted,
            evidence={"seq": first.number("seq")},
        )


def _trace_culprits(book: LogBook) -> Iterator[Candidate]:
    """Ranks that torchfrtrace lists because they differ from the first rank. If it lists more than half of all ranks,
    the others are named instead."""
    lines = [entry for entry in book.of("trace_culprits") if entry.ranks()]
    if not lines:
        return
    first, size = lines[0], book.world_size or 0
    listed_ranks = tuple(sorted(set(first.ranks())))
    others = tuple(rank for rank in range(min(size, 4096)) if rank not in listed_ranks)
    ranks = () if not others else listed_ranks if len(listed_ranks) <= len(others) else others
    error = first.text("error")
    yield from_lines(
        _TRACE_ERRORS.get(error, "mismatch"),
        lines,
        rank_class="mismatch",
        ranks=ranks,
        what=f"{who(ranks, 'ranks')} called a collective that differs from the other ranks' call ({error})",
        why=first.quoted,
        is_proven=bool(ranks) and len(listed_ranks) != len(others),
        evidence={"listed_ranks": list(listed_ranks[:64])},
    )


def _trace_missing(book: LogBook) -> Iterator[Candidate]:
    """Calls that lack ranks according to torchfrtrace: these ranks did not make the call, or their dumps are
    missing."""
    lines = [entry for entry in book.of("trace_missing") if entry.ranks()]
    if lines:
        ranks = tuple(sorted(set(lines[0].ranks())))
        yield from_lines(
            "not_entered",
            lines,
            rank_class="hang",
            ranks=ranks,
            what=f"{who(ranks)} did not make a call that is in the other ranks' dumps",
            why=f"{lines[0].place}: torchfrtrace lists them as missing, which it also does for ranks without a dump",
            is_proven=False,
        )


def _tasks(book: LogBook) -> Iterator[Candidate]:
    """An NPU task that did not end: its device stopped, or it waited for another rank."""
    lines = list(book.of("device_task_timeout"))
    if lines and not any(book.of_role("victim")):
        yield from_lines(
            "device_stuck",
            lines,
            rank_class="hang",
            what=f"A task on a device did not end in time ({lines[0].text('reason')})",
            is_proven=False,
            evidence={
                "reported_by_ranks": list(ranks_of(lines)),
                "do": "Look for an earlier error in the plogs of all hosts (~/ascend/log) and `npu-smi info`. If there "
                "is none, a rank came late, and the task waited for it: read the ends of the other ranks' logs.",
            },
        )


def _stalled(book: LogBook) -> Iterator[Candidate]:
    """Horovod repeatedly lists the ranks that have not submitted a tensor; the last list is the final state."""
    lines = [entry for entry in book.of("stalled_ranks") if entry.ranks() or entry.ranks("ready")]
    lines = lines if lines and relevance(lines[-1], book) != "survived" else []  # if the job survived, a rank was slow
    if lines and (apart := lines[-1].text("apart")):
        lacking = ", ".join(f"rank {one.replace(': ', ' not ', 1)}" for one in apart.split("; "))
        yield from_lines(
            "mismatch",
            lines,
            rank_class="mismatch",
            what=f"Each of {ranks_text(lines[-1].ranks())} waits for a tensor that another did not submit: {lacking}",
            why=f"{lines[-1].place}: Horovod's stall inspector lists the ranks that are missing, by tensor",
            is_proven=False,
        )
    elif lines:
        ready = set(lines[-1].ranks("ready"))
        size = max(book.world_size or 0, max(ready, default=-1) + 1)
        ranks = tuple(sorted({*lines[-1].ranks(), *(set(range(size)) - ready if ready else ())}))
        others = "the other ranks" if ranks else ranks_text(sorted(ready))
        yield from_lines(
            "not_entered",
            lines,
            rank_class="hang",
            ranks=ranks,
            what=f"{who(ranks)} did not submit a tensor that {others} wait for",
            why=f"{lines[-1].place}: Horovod's stall inspector lists the ranks that are missing",
            is_proven=False,  # Horovod warns after a minute, so the rank may only have been slow
        )


def _quorum(book: LogBook) -> Iterator[Candidate]:
    """torchft's lighthouse prints how many replicas take part, until there are enough; the last line counts."""
    lines = [entry for entry in book.of("no_quorum") if relevance(entry, book) != "survived"]
    if not lines or any(book.position(lines[-1]) < book.position(entry) for entry in book.of("quorum")):
        return
    arrived, wanted = lines[-1].number("arrived"), lines[-1].number("wanted")
    yield from_lines(
        "rendezvous",
        lines[-20:],
        rank_class="victim",
        what=f"torchft waits for replicas: {arrived} take part, of {wanted} that "
        + ("send heartbeats" if "at least half of" in lines[-1].message else "it needs"),
        why=lines[-1].quoted,
        is_proven=False,
        evidence={"do": "Read the ends of the logs of the replicas that do not take part: they ended, or do not reach "
                  "the lighthouse."},
    )  # fmt: skip


def _ras(book: LogBook) -> Iterator[Candidate]:
    """NCCL's RAS counts operations while the job runs: a rank that is behind may still catch up, so it is a suspect."""
    lines = [entry for entry in book.of("ras_state") if entry.ranks()]
    largest = max((entry.number("members") or 0 for entry in lines), default=0)
    # Keep the lines about the largest group: waits in smaller groups are consequences.
    lines = [entry for entry in lines if (entry.number("members") or 0) == largest]
    ranks = named_by(lines)
    if not ranks:
        return
    first = lines[0]
    launched, most = first.number("launched"), first.number("most_launched")
    what = "did not answer NCCL's RAS" if most is None else f"had launched {launched} operations, the others {most}"
    yield from_lines(
        "not_entered",
        lines,
        rank_class="hang",
        ranks=ranks,
        what=f"{who(ranks)} {what}",
        why=first.quoted,
        is_proven=False,
        evidence={"launched": launched, "most_launched": most},
    )


def _first_calls(book: LogBook) -> Iterator[Candidate]:
    """A group's first call: all members fetch an id that its first rank publishes when it makes that call."""
    lines = [entry for entry in book.of("unique_id_timeout") if "timeout" in entry.text("error").lower()]
    ranks = named_by(lines)
    if ranks:
        yield from_lines(
            "not_entered",
            lines,
            rank_class="hang",
            ranks=ranks,
            what=f"{who(ranks)} did not make the first call of a group in time: the others wait for the NCCL id that "
            "it publishes",
            why=f"{lines[0].place}: {lines[0].message[:200]}",
            evidence={"waiting_ranks": sorted({entry.rank for entry in lines if entry.rank is not None} - set(ranks))},
        )


def _first_rank(book: LogBook) -> Iterator[Candidate]:
    """Work that only the first rank does while the others wait at a barrier, such as preparing a data set."""
    seeds = list(book.of("shared_seed"))
    waits = [one for one in book.of("exception") if _RANK_0_FIRST.search(one.text("traceback")) and is_victims(one)]
    waiting = sorted({one.rank for one in (*seeds, *waits) if one.rank is not None})
    if not (seeds or waits) or 0 in waiting:
        return
    lines = (*waits, *seeds)
    hosts = {entry.host for entry in lines if entry.host}
    is_of_node = bool(waits) and (len(hosts) > 1 or max(waiting, default=0) >= LogPolicy().usual_ranks_of_a_node)
    first = "the first rank of a node" if is_of_node else "rank 0"
    yield from_lines(
        "not_entered",
        lines,
        rank_class="hang",
        ranks=() if is_of_node else (0,),
        what=f"{who(waiting, 'the other ranks')} gave up waiting for {first}, which "
        + ("publishes the epoch's seed" if not waits else "runs this code before the others"),
        is_proven=False,
        evidence={"waiting_ranks": waiting},
    )


_DIFFERENCES = {
    "mismatch_size": "Ranks called the same collective with different sizes",
    "mismatch_dtype": "Ranks called the same collective with different element types",
    "skipped": "Ranks called collectives of different numbers at the same place",
}
"""Start of the sentence on calls that differ, by cause."""


def _detail(book: LogBook) -> Iterator[Candidate]:
    """Each rank reports how it differs from one other rank. Name the rank that differs from most, or both if there are
    only two."""
    lines = list(book.of("collective_mismatch"))
    if not lines:
        return
    called: dict[int, Call] = {}
    for entry in lines:
        for side in ("a", "b"):
            rank = entry.number(f"rank_{side}")
            if rank is not None and (rank not in called or not called[rank].shape):
                called[rank] = Call(
                    rank=rank, group="", seq=entry.number(f"seq_{side}") or 0, op=entry.text(f"op_{side}"),
                    shape=entry.text(f"shape_{side}"), dtype=entry.text(f"dtype_{side}"),
                )  # fmt: skip
    calls = [call for _, call in sorted(called.items())]
    cause, ranks = _difference(calls)
    sides = "; ".join(f"rank {call.rank} calls {call.op} {call.shape and f'[{call.shape}]'} {call.dtype}".strip()
                      for call in calls[:4])  # fmt: skip
    yield from_lines(
        cause,
        lines,
        rank_class="mismatch",
        ranks=ranks,
        what=f"{_DIFFERENCES.get(cause, 'Ranks called different collectives at the same place')}: {sides}",
        why=f"{lines[0].place}: TORCH_DISTRIBUTED_DEBUG=DETAIL compared the calls",
        evidence={"calls": {str(call.rank): f"{call.op} {call.shape} {call.dtype}" for call in calls[:16]}},
        collect=(),
    )


def _difference(calls: Sequence[Call]) -> tuple[str, tuple[int, ...]]:
    """The cause and ranks of calls that torch found to differ; its text may not show the difference."""
    if len(calls) < 2:
        return "mismatch", tuple(call.rank for call in calls)  # older versions of torch print only one side
    found = compare_calls(calls, sized=True)
    if found is not None:
        return found.cause, found.ranks
    if calls[0].op and calls[0].shape and calls[0].dtype:
        # The calls are equal except for their numbers.
        return "skipped", smaller_side({call.rank: call.seq for call in calls})
    return "mismatch_size", tuple(call.rank for call in calls)


def _stuck(book: LogBook) -> Iterator[Candidate]:
    lines = list(book.of("watchdog_stuck"))
    ranks = ranks_of(lines)
    stuck_s = next((found for entry in lines if (found := entry.number("stuck_s"))), None)
    if lines and not any(book.of("watchdog_timeout")):
        yield from_lines(
            "watchdog_stuck",
            lines,
            rank_class="hang",
            what=f"The watchdog thread of {ranks_text(ranks)} was blocked for "
            f"{f'{stuck_s} s' if stuck_s else 'too long'} in a CUDA call or waiting for Python's GIL",
            why=f"{lines[0].place}: no timeout of a call was reported, so the rank that caused it is unknown",
            is_proven=False,
            evidence={"ranks_with_blocked_watchdog": list(ranks)},
        )


def _timed_out(book: LogBook) -> Iterator[Candidate]:
    """gloo names no call, so ranks that reported no timeout are suspects."""
    lines = list(book.of("gloo_timeout"))
    waiting = {entry.rank for entry in lines if entry.rank is not None}
    if not lines:
        return
    size = book.world_size or (max(waiting) + 1 if waiting else 0)
    with_errors = book.ranks_with_errors
    missing = tuple(rank for rank in range(min(size, 4096)) if rank not in waiting | with_errors)
    missing = missing if len(missing) < len(waiting) and not with_errors - waiting else ()
    yield from_lines(
        "not_entered" if missing else "all_entered",
        lines,
        rank_class="hang",
        ranks=missing,
        what=f"{who(sorted(waiting), 'a rank')} waited {(lines[0].number('timeout_ms') or 0) / 1e3:.0f} s "
        "for a gloo message that did not arrive"
        + (f", and {who(missing).lower()} reported no timeout" if missing else ""),
        why=f"{lines[0].place}: {lines[0].message[:120]}",
        is_proven=False,
        evidence={"waiting_ranks": sorted(waiting), "do": _do_of(waiting, book) if not missing else None},
    )


def _unnumbered(book: LogBook) -> Iterator[Candidate]:
    """A call timed out without a printed number (torch before 1.12, vLLM, excerpts), so ranks cannot be compared."""
    lines = list(book.of("watchdog_timeout", "call_timeout", "no_heartbeat"))
    lines = [entry for entry in lines if relevance(entry, book) != "survived"]
    if lines:
        waiting = list(ranks_of(lines))
        operations = {entry.text("op") for entry in lines if entry.text("op")}
        unnamed = (
            f" in {operations.pop()}, and no line names" if len(operations) == 1 else ", and no line names the call or"
        )
        yield from_lines(
            "all_entered",
            lines[:20],
            kind="hang",
            rank_class="victim" if all(entry.kind == "call_timeout" for entry in lines) else "hang",
            what=f"{who(waiting)} gave up waiting for other ranks{unnamed} the rank"
            if any(entry.kind != "no_heartbeat" for entry in lines)
            else f"{who(waiting)} made no progress for {lines[0].number('waited_s')} s, and its monitor ended the "
            "job; no line names the call",
            is_proven=False,
            evidence={"waiting_ranks": waiting, "do": _do_of(waiting, book)},
        )


def _do_of(waiting: Collection[int], book: LogBook) -> str | None:
    """Advice to read the logs of ranks that these files do not show waiting; None if all ranks wait."""
    if book.world_size is not None and len(waiting) >= book.world_size:
        return None
    return "Read the end of the other ranks' logs: one of them made this call late or never, and its log may show why."
