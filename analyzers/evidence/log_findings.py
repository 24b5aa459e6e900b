"""Analysis of text logs: one verdict on the end of a job, from the lines of all files.

    findings = analyze(source)

1. Every line that names a cause makes a candidate (`logged_hosts`, `logged_errors`, `logged_endings`, `logged_calls`).
2. Candidates have this order of precedence: the kernel and the scheduler, what processes say about themselves,
   mismatches, deaths without a message, hangs, the network, victims. Within a class the earliest line comes first.
3. Ranks that only report a peer or an aborted call are victims: they are listed, never blamed.
4. A suspicion is never stated as proven, and lists the commands that would settle it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from analyzers.causes import COLLECT, anchor
from analyzers.deaths.logged.logged_endings import Ended, death_candidates, endings
from analyzers.deaths.logged.logged_errors import process_candidates
from analyzers.deaths.logged.logged_hosts import host_candidates
from analyzers.evidence.log_context import interface_candidates, peer_addresses, peer_texts, with_facts
from analyzers.evidence.only_end import in_order_of_ends, name_only_end
from analyzers.evidence.unnamed_errors import failed_warnings, unnamed_errors, with_error_line
from analyzers.finding import Finding
from analyzers.hangs.logged.logged_calls import call_candidates
from analyzers.health.ascend_codes import CODES_OF_WAITS, codes_in, explained_code
from analyzers.logs.candidate import Candidate, from_lines, ranks_of, who
from analyzers.logs.exceptions import relevance, text_of, type_of
from analyzers.logs.log_events import LogBook, LogLine, quotes
from analyzers.logs.wording import ANALYZER
from analyzers.numerics.loss.printed_values import DO
from analyzers.run.ends.exceptions import read_traceback
from analyzers.source import Source
from analyzers.wording import ranks_text

__all__ = ["analyze"]

_PIPE = re.compile(
    r"/multiprocessing/(?:connection|queues|managers|resource_sharer|reduction|synchronize|spawn|forkserver)\.py$"
)
_DO_WITH_DEBUG = "NCCL_DEBUG was on and these lines name no cause: compare what the other ranks' logs say at that time."
_DO_OF_STORE = (
    "Read the log of the launcher that serves the store first (the host of --rdzv-endpoint), and that of its host."
)
MAX_ALSO = 3
"""Maximum findings after the first; further ones are consequences."""
MAX_RANKS_PER_NODE = 128


def analyze(source: Source) -> list[Finding]:
    """Findings of kinds `rank_lost`, `hang` and `non_finite`, from table `log_events`."""
    book = LogBook.load(source)
    if not book.lines:
        return []
    ended = endings(book)
    candidates = [*host_candidates(book), *process_candidates(book, ended), *death_candidates(book, ended)]
    candidates += [*call_candidates(book), *_numerics(book), *interface_candidates(book)]
    candidates = sorted(name_only_end(_merged(candidates), book, ended), key=lambda candidate: candidate.order(book))
    if any(one.cause == "no_interface" for one in candidates):  # drop the causes that a missing interface explains
        candidates = [one for one in candidates if one.cause not in ("unreachable", "nccl_error", "rendezvous")]
    candidates = in_order_of_ends(candidates, book)
    if not candidates and ended.victim_lines:
        candidates = [_connections(book, ended)]
    candidates = candidates or _barriers(book) or _nccls(book) or unnamed_errors(book)
    if not candidates:
        return []
    candidates = [with_error_line(with_facts(one, book, ended), book) for one in candidates]
    first = _contested(candidates)
    findings = [_finding(first, ended, book)]
    for other in candidates[1:]:
        if first.evidence.get("contradicted_by"):
            break
        if len(findings) <= MAX_ALSO and _is_another(other, first):
            findings.append(replace(_finding(other, ended, book), status="suspect", severity="warning"))
    return findings


def _contested(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first candidate. If an error of another rank may be earlier, because the two have no common order of
    lines or time, return it without ranks and as a suspicion."""
    first = candidates[0]
    if first.rank_class != "error" or not first.ranks:
        return first
    others = [one for one in candidates[1:] if one.rank_class == "error" and one.is_proven and one.ranks
              and not set(one.ranks) & set(first.ranks) and not _are_ordered(first.lines[0], one.lines[0])]  # fmt: skip
    if not others:
        return first
    ranks = sorted({*first.ranks, *(rank for one in others for rank in one.ranks)})
    return replace(
        first,
        ranks=(),
        is_proven=False,
        what=f"{who(ranks)} each raised an error, and the logs do not show which came first. {first.what}",
        evidence={**first.evidence, "contradicted_by": [one.what for one in others[:8]]},
        collect=COLLECT["contested"],
    )


def _are_ordered(one: LogLine, other: LogLine) -> bool:
    return one.source == other.source or (one.wall_ns is not None and other.wall_ns is not None)


def _merged(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Merge a report by the kernel and one by a process about the same end. The kernel's candidate stays, with the rank
    of the other."""
    hosts = [candidate for candidate in candidates if candidate.rank_class == "host"]
    explained = [candidate for candidate in candidates if any(_same(one, candidate) for one in hosts)]
    joined: list[Candidate] = []
    for candidate in candidates:
        if candidate in explained:
            continue
        # A kernel line has no rank, so it takes the rank of the line that it explains.
        same = [one for one in explained if candidate.rank_class == "host" and _same(candidate, one)]
        ranks = candidate.ranks or next((one.ranks for one in same if len(one.ranks) == 1), ())
        what = candidate.what
        if ranks and not candidate.ranks:
            what = f"{who(ranks)}: {what[:1].lower()}{what[1:]}"
        also = [f"{entry.place}: {entry.message[:120]}" for one in same for entry in one.lines[:1]]
        evidence = {**candidate.evidence, **({"also": also} if also else {})}
        joined.append(replace(candidate, ranks=ranks, what=what, evidence=evidence))
    return joined


def _same(host: Candidate, other: Candidate) -> bool:
    if other.rank_class == "host" or (host.ranks and other.ranks and not set(host.ranks) & set(other.ranks)):
        return False
    if host.cause == "host_out_of_memory":
        killed = other.cause == "signal" and other.evidence.get("signal") == "SIGKILL"
        return killed or other.cause in ("host_out_of_memory", "data_worker")
    if host.cause == "device_error":
        return other.cause in ("device_error", "device_setup", "nccl_error")
    return other.cause == "cancelled"


def _is_another(other: Candidate, first: Candidate) -> bool:
    """Return True if a second candidate gets its own finding: it is proven, on other ranks, and no consequence."""
    if other.rank_class == "host":
        return True
    on_other_ranks = not set(other.ranks) & set(first.ranks) if other.ranks and first.ranks else False
    return (
        other.is_proven and other.rank_class in ("error", "numerics") and on_other_ranks and first.rank_class != "host"
    )


def _numerics(book: LogBook) -> list[Candidate]:
    floor = [entry for entry in book.of("loss_scale_floor") if relevance(entry, book) != "survived"]
    if floor and not any(book.of("nonfinite")):
        return [_exhausted_scale(floor, list(book.of("overflow")))]
    norms = [entry for entry in book.of("gradient_norms") if entry.number("nonfinite")]
    lines = [entry for entry in book.of("nonfinite")  # without a step, it may be input of a tracker or a help text
             if entry.number("step") is not None or not entry.number("stays_finite")]  # fmt: skip
    lines += [*book.of("loss_scale_floor"), *norms]
    if not lines:
        return []
    ranks = ranks_of([one for one in lines if not one.number("num")])  # Megatron's last rank prints `num` for all ranks
    if norms:  # if no rank's norm is finite, the norms identify no rank
        ranks = norms[0].ranks() if norms[0].number("nonfinite") != norms[0].number("listed") else ()
    step = next((entry.number("step") for entry in lines if entry.number("step") is not None), None)
    after = None if step is not None else lines[0].number("after_step")
    raised = {one.place for one in book.of("exception") if relevance(one, book) == "fatal"}
    where = f" at step {step}" if step is not None else f" after the line of step {after}" if after is not None else ""
    return [
        from_lines(
            "unknown",
            lines,
            kind="non_finite",
            rank_class="error" if any(one.place in raised for one in lines) else "numerics",
            ranks=ranks,
            what=f"{who(ranks, 'the training')} report{'s' * (len(ranks) < 2)} NaN or Inf values{where}",
            evidence={"step": step if step is not None else after, "do": DO},
        )
    ]


def _exhausted_scale(floor: list[LogLine], overflows: list[LogLine]) -> Candidate:
    """Candidate for fp16 training in which steps overflowed until the loss scale was at or near its minimum."""
    steps = [step for entry in overflows if (step := entry.number("after_step")) is not None]
    since = f" since about step {steps[0]}" if steps else ""
    scale = floor[-1].text("scale")
    count = f": {len(overflows)} overflow{'s' * (len(overflows) > 1)} in the log{since}" if overflows else ""
    return from_lines(
        "unknown",
        (*floor[:4], *overflows[:4]),
        rank_class="numerics",
        what=f"The fp16 loss scale is exhausted: gradients are not finite even at {scale or 'its minimum'}{count}",
        why=floor[0].quoted,
        evidence={
            "step": steps[0] if steps else floor[0].number("after_step"),
            "num_overflows": len(overflows) or None,
            "do": "Train in bf16, which needs no loss scale. Otherwise lower the learning rate, clip harder, and "
            "inspect the data and the update before the first overflow.",
        },
    )


def _barriers(book: LogBook) -> list[Candidate]:
    """Candidate if the log ends while ranks wait for others to join. It shows how many are missing, but not which."""
    lines = [entry for entry in book.of("store_barrier") if relevance(entry, book) != "survived"]
    size = book.world_size
    if not lines and size is not None:
        return _members(book, size)
    arrived = max((entry.number("arrived") or 0 for entry in lines), default=0)
    if size is None or not lines or arrived >= size:
        return []
    return [
        from_lines(
            "rendezvous",
            tuple(lines[-20:]),
            rank_class="victim",
            what=f"{arrived} of {size} ranks joined the process group, and the others did not join",
            why=lines[-1].quoted,
            is_proven=False,
            evidence={
                "waiting_ranks": sorted({rank for entry in lines if (rank := entry.number("waiting")) is not None})
            },
        )
    ]


def _members(book: LogBook, size: int) -> list[Candidate]:
    """Candidate for missing or duplicate ranks, from processes that printed their rank and never joined."""
    lines = [entry for entry in book.of("member") if not entry.number("later_steps")]
    joining = Counter(rank for entry in lines if (rank := entry.number("waiting")) is not None)
    files = Counter((entry.source, entry.number("waiting")) for entry in lines)
    twice = sorted({rank for (_, rank), count in files.items() if count > 1 and rank is not None})
    missing = sorted(set(range(min(size, 4096))) - joining.keys())
    if not missing or not joining or any(book.of("finished", "nccl_comm")):
        return []
    what = f"{len(joining)} of {size} ranks began to join the process group, and {ranks_text(missing)} did not"
    what += f"; {who(twice).lower()} began more than once" if twice else ""
    return [
        from_lines(
            "rendezvous",
            tuple(lines[-20:]),
            rank_class="victim",
            what=what,
            why=lines[-1].quoted,
            is_proven=False,
            evidence={
                "waiting_ranks": sorted(joining),
                "do": "Start one task per device on each node (Slurm: set --ntasks-per-node to the number of devices "
                "and start the program with srun), and read the logs of the nodes that did not join.",
            },
        )
    ]


def _nccls(book: LogBook) -> list[Candidate]:
    """Candidate if the log only has NCCL's errors or warnings about a failed call, without a cause."""
    failed = [entry for entry, _ in book.of_role("nccl")]
    lines = [entry for entry in failed if relevance(entry, book) != "survived"] if failed else failed_warnings(book)
    if not lines:
        return []
    text = lines[0].text("text") or lines[0].message
    has_debug_lines = any(book.of("nccl_comm", "nccl_interface", "nccl_proxy", "nccl_warning"))
    return [
        from_lines(
            "nccl_error",
            lines[:20],
            rank_class="victim",
            what=f"NCCL reports an error that does not name its cause: {text[:160].rstrip('.')}",
            is_proven=False,
            severity="critical" if failed else "warning",
            evidence={
                "reported_by_ranks": sorted({entry.rank for entry in lines if entry.rank is not None})[:64],
                "do": _DO_WITH_DEBUG if has_debug_lines else None,
            },
            collect=("the logs of all ranks",) if has_debug_lines else COLLECT["nccl_error"],
        )
    ]


def _connections(book: LogBook, ended: Ended) -> Candidate:
    """Candidate if ranks only report that they lost a peer. If the world size is known, ranks without such a report are
    suspected, provided that they are fewer."""
    lines = tuple(sorted(ended.victim_lines, key=book.position)[:20])
    if _are_of_pipes(lines):
        return _pipes(lines)
    victims = tuple(sorted(ended.victims))
    size = book.world_size
    missing = tuple(rank for rank in range(min(size or 0, 4096)) if rank not in ended.victims)
    named = {tuple(entry.ranks()) for entry in book.of("jax_task_lost")} - {()}
    silent = missing if victims and 0 < len(missing) < len(victims) else ()
    suspects = tuple(sorted(*named)) if len(named) == 1 else silent
    peers = peer_addresses(lines) if not suspects else []
    codes = list(dict.fromkeys(code for entry in lines for code in codes_in(text_of(entry))))
    details = f" ({', '.join(explained_code(code) for code in codes[:3])})" if codes else ""
    event = "waited in vain for" if codes and set(codes) <= set(CODES_OF_WAITS) else "lost the connection to"
    awaited = {rank for entry in lines if (rank := entry.number("awaited")) is not None}
    details += f"; what it waits for comes from rank {min(awaited)} of its group" if len(awaited) == 1 else ""
    nodes = sorted({re.sub(r"_\d+_\d+$", "", name) for entry in lines if (name := entry.text("node"))})
    names = ", ".join(nodes[:4])
    agents = f"The launcher of {names} lost the connection to the rendezvous store" if nodes and not victims else ""
    details += f"; {names} no longer reached the rendezvous store" if nodes and victims else ""
    daemons = sorted({name for entry in lines if (name := entry.text("daemon"))})
    details += f"; mpirun lost its daemon on {', '.join(daemons[:4])}" if daemons else ""
    peer, do = peer_texts(peers)
    return from_lines(
        "connection_lost",
        lines,
        rank_class="victim",
        ranks=suspects,
        what=(agents or f"{who(victims, 'the ranks')} {event} another rank")
        + details
        + (
            f", and {who(suspects).lower()} {'sent no heartbeat' if len(named) == 1 else 'reported no lost connection'}"
            if suspects
            else f", {peer}: this log is from a victim"
            if peers
            else ": this log is from a victim"
            if agents
            else ", and the logs do not show which rank ended first"
        ),
        why=lines[0].quoted,
        is_proven=False,
        evidence={
            "victims": list(victims),
            "peers": peers or None,
            "codes": codes or None,
            "do": do or (_DO_OF_STORE if agents else None),
        },
    )


def _are_of_pipes(lines: Sequence[LogLine]) -> bool:
    """Return True if all errors come from a pipe or queue between a process and its child."""
    framed = [(entry, links) for entry in lines if (links := read_traceback(entry.text("traceback")))]
    rest = [entry for entry in lines if not entry.text("traceback")]  # entries that are only a traceback's last line
    return (
        bool(framed)
        and all(_PIPE.search(links[-1].frames[-1].path) for _, links in framed)
        and all(any(type_of(one) in entry.message for one, _ in framed) for entry in rest)
    )


def _pipes(lines: tuple[LogLine, ...]) -> Candidate:
    ranks = ranks_of(lines)
    return from_lines(
        "data_worker",
        lines,
        rank_class="victim",
        ranks=ranks,
        what=f"{who(ranks, 'a process')} found the pipe to its parent or child process closed, and the logs do not "
        "show why that process ended",
        is_proven=False,
        collect=COLLECT["signal"],
    )


def _ranks_of_node(candidate: Candidate, book: LogBook) -> set[int]:
    """Ranks of the node that failed. Lines that they print as they end are not a consequence of another rank's end.

    Lines of srun name the tasks of a host. If each task started a launcher, its command has the number of ranks.
    """
    if candidate.cause != "node_failed":
        return set()
    hosts = {str(candidate.evidence.get("host")), *(str(entry.host) for entry in candidate.lines if entry.host)}
    each = min(max(book.ranks_per_node, 1), MAX_RANKS_PER_NODE)
    tasks = (task for entry in book.of("slurm_task") if str(entry.host) in hosts for task in entry.ranks())
    return {rank for task in tasks for rank in range(task * each, (task + 1) * each)}


def _finding(candidate: Candidate, ended: Ended, book: LogBook) -> Finding:
    victim_ranks = set(ended.victims) | set(candidate.evidence.get("waiting_ranks", ()))
    if candidate.kind != "hang" and candidate.ranks:
        victim_ranks |= set(ranks_of(book.of("watchdog_timeout")))
    victims = sorted(victim_ranks - set(candidate.ranks) - _ranks_of_node(candidate, book))
    # in a hang of unknown cause, any rank may be the culprit
    are_apart = bool(candidate.ranks) or candidate.kind != "hang"
    consequence = f" {who(victims)} failed as a consequence." if victims and are_apart else ""
    doubt = "" if candidate.is_proven else " Suspected: the logs do not prove it."
    host = next((entry.host for entry in candidate.lines if entry.host), None)
    evidence = {
        **{key: value for key, value in candidate.evidence.items() if value is not None},
        "basis": candidate.why,
        "lines": quotes(candidate.lines),
        "victims": victims[:64],
    }
    if host is not None:
        evidence["host"] = host
    if candidate.kind == "hang":
        evidence["host_only"] = True  # a log shows that hosts made the call, not that the devices entered it
    if candidate.collect:
        evidence["collect"] = list(candidate.collect)
    step = candidate.evidence.get("step")
    return Finding(
        analyzer=ANALYZER,
        kind=candidate.kind,
        severity="critical" if candidate.severity == "critical" else "warning",
        status="fired" if candidate.is_proven else "suspect",
        ranks=candidate.ranks,
        first_step=step,
        last_step=step,
        cause=candidate.cause,
        summary=f"{candidate.what}.{consequence}{doubt}",
        evidence=evidence,
        advice=anchor(candidate.kind, candidate.cause),
    )
