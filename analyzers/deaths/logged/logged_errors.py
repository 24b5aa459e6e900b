"""Causes stated by the processes themselves: exceptions, and lines of libraries that name a cause.

1. An exception is the rank's own, except in four cases: its text is about a peer (`victim` in the rules), it was raised
   in a call that waits for other ranks, it is a launcher's summary, or the rank's watchdog had timed out before.
2. An exception proves nothing in three cases: the job went on after it, the launcher was already ending the job, or a
   background thread raised it.
3. The same exception on several ranks is one candidate with all of them.
4. Of chained exceptions the last one is reported, together with the original one. An exception is reported alone if its
   text names a known cause, or if errors of peers follow it.
"""

from __future__ import annotations

import re
from typing import Any

from analyzers.causes import CAUSES
from analyzers.deaths.logged.logged_endings import Ended
from analyzers.deaths.logged.stated_reasons import join_failed_writes, stated_reason
from analyzers.health.ascend_codes import codes_in, explained_code
from analyzers.logs.candidate import Candidate, from_lines, named_by, ranks_of, who
from analyzers.logs.exceptions import (
    Relevance,
    is_closed_by_loss,
    is_cut_start,
    is_launchers,
    is_stop,
    is_uncaught,
    is_victims,
    relevance,
    text_of,
    type_of,
    waits_for_launchers,
    words_of,
)
from analyzers.logs.log_events import LogBook, LogLine
from analyzers.logs.wording import DO_OF_LINE, do_of_device
from analyzers.memory.allocator_message import memory_of_message
from analyzers.run.ends.exceptions import own_frame_text
from analyzers.wording import cut
from store.readers.logs.rules import Rule, cause_of, is_supposed

__all__ = ["process_candidates"]

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_RANKS = re.compile(r"\b[Rr]ank[ :=_]?(\d{1,6})\b")
_FAILED_TOGETHER = re.compile(r"CheckpointException ranks:dict_keys\(\[([\d, ]+)\]")
"""The summary of torch.distributed.checkpoint that lists ranks, above the tracebacks of these ranks."""
_LIMITS = ("too_many_processes", "too_many_files", "host_out_of_memory", "shared_memory", "disk_full")
_MISSING = re.compile(r"/([\w.-]{1,80})\.so: cannot open shared object file")
_BUILDING = re.compile(r"Error building extension '([\w.-]{1,80})'")
_WITH_REASONS = ("rendezvous", "file_system", "exception", "infiniband", "nccl_error", "data_worker", "device_error")
_PIPES = ("EOFError", "BrokenPipeError", "ConnectionResetError")
_UNIQUE_ID = "ing ncclUniqueId from ["
_CLAUSE = re.compile(r"[:;,] ")
_SYNCHRONIZE = "stream synchronize failed"
"""Part of the error that torch_npu raises on the host when it waits for a task that failed in any way."""
_NO_EVIDENCE = (
    "traceback",
    "type",
    "message",
    "ranks",
    "after_step",
    "is_warning",
    "later_steps",
    "own_rank",
    "local_rank",
    "chained",
)


def process_candidates(book: LogBook, ended: Ended) -> list[Candidate]:
    """Candidates for every cause that a process or its launcher states."""
    first_timeout = {entry.rank: book.position(entry) for entry in reversed(list(book.of("watchdog_timeout")))}
    has_timeout = any(book.of("device_task_timeout"))
    chains = _chains(book)
    unstarted = [one for one in book.of("exception") if is_cut_start(one)]
    stacks = [one for one in book.of("exception") if one.text("traceback")]
    continued = {_first_line_of(one) for one in stacks if "\n" in one.text("message") and not is_victims(one)}
    found: dict[tuple[str, str], list[tuple[LogLine, Relevance]]] = {}
    for entry in book.of("exception"):
        if is_launchers(entry) or is_victims(entry) or is_stop(entry):
            continue
        if is_closed_by_loss(entry, book) or _lacks_failed_build(entry, book):
            continue
        if _repeats(entry, unstarted) or (not entry.text("traceback") and _first_line_of(entry) in continued):
            continue
        gave_up = first_timeout.get(entry.rank)
        if gave_up is not None and gave_up < book.position(entry):
            continue  # the error followed a timeout of the rank's watchdog, which is the better evidence
        if has_timeout and _SYNCHRONIZE in text_of(entry):
            continue  # the rank waited for the task that timed out
        rule = cause_of(words_of(entry))
        if rule is not None and (rule.kind in _NAMES_RANKS or (rule.role == "numerics" and _is_numeric(rule, book))):
            continue  # another module judges such lines
        if _UNIQUE_ID in text_of(entry):
            continue
        cause = _cause(entry, rule)
        if cause == "exception" and (last := chains.get((entry.source, entry.line))) and last.line > entry.line:
            continue
        message = entry.text("message").partition("\n")[0][:120]
        key = _NUMBERS.sub("#", f"{type_of(entry)}: {message}") if cause == "exception" else ""
        how = "aside" if cause == "exception" and _was_killed_later(entry, ended) else relevance(entry, book)
        how = "aside" if how == "fatal" and _was_caught(entry, book) else how
        found.setdefault((cause, key), []).append((entry, how))
    for entry, rule in book.of_role("root"):
        if _repeats(entry, unstarted):
            continue
        gave_up = first_timeout.get(entry.rank)
        if rule.kind in _NOT_LINES or (gave_up is not None and gave_up < book.position(entry)):
            continue
        if is_closed_by_loss(entry, book):
            continue
        found.setdefault((_cause(entry, rule), ""), []).append((entry, relevance(entry, book)))
    _join_broken_pipes(found)
    join_failed_writes(found)
    candidates = []
    for (cause, _), group in found.items():
        aside = [entry for entry, how in group if how in ("aside", "ignored", "after")]
        proven = [entry for entry, how in group if how == "fatal" and not _is_last_line_of(entry, aside)]
        ignored = [entry for entry, how in group if how == "ignored"]
        rest = [one for one, how in group if how in ("after", "aside") and not _is_last_line_of(one, ignored)]
        # Buffered standard output may come late. So if any process ended, an error is a suspicion even if steps follow
        # it.
        is_over = bool(ended.victim_lines) or any(book.of_role("death"))
        rest += [entry for entry, how in group if how in ("survived", "ignored") and is_over]
        if proven or rest:
            candidates.append(_candidate(cause, proven or rest, book, chains, is_own=bool(proven)))
    return candidates


def _join_broken_pipes(found: dict[tuple[str, str], list[tuple[LogLine, Relevance]]]) -> None:
    """Attribute a broken pipe to a resource limit that a thread hit earlier in the same file: the process of this
    thread was at the other end of the pipe. The error of the pipe shows the rank.
    """
    for cause in _LIMITS:
        limits = [entry for entry, how in found.get((cause, ""), ()) if how == "aside"]
        if not limits:
            continue
        for key, group in [*found.items()]:
            if key[0] != "exception" or not all(type_of(one) in _PIPES and _follows(one, limits) for one, _ in group):
                continue
            found[cause, ""] = [(entry, "fatal") for entry in limits]
            found[cause, ""] += [(one, how) for one, how in group if one.rank is not None]
            del found[key]


def _follows(entry: LogLine, earlier: list[LogLine]) -> bool:
    return any(one.source == entry.source and one.line < entry.line for one in earlier)


def _is_numeric(rule: Rule, book: LogBook) -> bool:
    """Return False if the exception says that gradients differ between ranks, but all of them are finite: no value
    explains it."""
    return rule.kind != "gradients_differ" or any(entry.number("nonfinite") for entry in book.of("gradient_norms"))


def _chains(book: LogBook) -> dict[tuple[str, int], LogLine]:
    """{(source, line) of a chained exception: counterpart}. The counterpart of the last exception in a chain is the
    first one; the counterpart of every other exception is the last one."""
    found: dict[tuple[str, int], LogLine] = {}
    open_chains: dict[tuple[str, int | None], list[LogLine]] = {}
    for entry in book.of("exception"):
        chain = open_chains.setdefault((entry.source, entry.rank), [])
        if entry.number("is_cut"):
            continue
        if not entry.text("traceback"):
            chain += [entry] if chain and entry.text("type") == chain[-1].text("type") else []
            continue
        chain.append(entry)
        if entry.number("chained"):
            continue
        del open_chains[entry.source, entry.rank]
        is_own = not (is_launchers(entry) or is_victims(entry) or is_stop(entry))
        if len(chain) > 1 and is_own and _cause(entry, cause_of(words_of(entry))) == "exception":
            found |= {(one.source, one.line): entry for one in chain[:-1]}
            found[entry.source, entry.line] = chain[0]
    return found


def _lacks_failed_build(entry: LogLine, book: LogBook) -> bool:
    """Return True if an extension cannot be loaded because another process, which built it for all, failed to."""
    missing = _MISSING.search(entry.text("message"))
    if missing is None:
        return False
    failed = (_BUILDING.search(one.text("message")) for one in book.of("exception"))
    return any(missing[1].startswith(name[1]) for name in failed if name is not None)


def _was_killed_later(entry: LogLine, ended: Ended) -> bool:
    """Return True for an exception without traceback if the rank continued after it, until a signal ended the rank."""
    signal, end = ended.signals.get(entry.rank if entry.rank is not None else -1, ("", entry))
    is_end = signal not in ("", "SIGTERM", "SIGABRT") and end.rank is not None
    return is_end and not entry.text("traceback") and end.source == entry.source and end.line > entry.line


def _was_caught(entry: LogLine, book: LogBook) -> bool:
    """Return True for an exception that the program may have caught: a step follows it, no frame shows that it left
    the main module, and either nothing reports the end of a process or a later exception did leave it.
    """
    if not entry.number("later_steps") or is_uncaught(entry):
        return False
    if not any(book.of_role("death", "victim", "outside", "hang")):
        return True
    return any(
        is_uncaught(one) and not one.number("later_steps") and one.line > entry.line and one.source == entry.source
        for one in book.of("exception")
        if not (is_launchers(one) or is_victims(one) or is_stop(one))
    )


def _is_last_line_of(entry: LogLine, tracebacks: list[LogLine]) -> bool:
    """Return True if an entry without traceback follows one of these tracebacks: it may be the last line of it."""
    return not entry.text("traceback") and any(
        one.source == entry.source and one.rank == entry.rank and one.line < entry.line for one in tracebacks
    )


def _repeats(entry: LogLine, tracebacks: list[LogLine]) -> bool:
    """Return True if a line repeats the type and the message of one of these tracebacks: it is the last line of it."""
    return any(
        _is_last_line_of(entry, [one]) and type_of(one) in entry.message and one.text("message") in entry.message
        for one in tracebacks
    )


def _first_line_of(entry: LogLine) -> tuple[str, int | None, str, str]:
    """Key of an error: the last line of a traceback is read alone as well, without the lines that follow it."""
    return (entry.source, entry.rank, type_of(entry), entry.text("message").partition("\n")[0])


_NAMES_RANKS = ("collective_mismatch", "desync_not_joined", "monitored_barrier", "trace_culprits", "jax_barrier")
"""Kinds of lines that name culprits other than the rank that raises the error. `logged_calls` judges them."""
_NOT_LINES = ("ray_memory", *_NAMES_RANKS)


def _cause(entry: LogLine, rule: Rule | None) -> str:
    if waits_for_launchers(entry):
        return "rendezvous"
    if rule is None or rule.role == "victim":
        return "host_out_of_memory" if type_of(entry) == "MemoryError" else "exception"
    if rule.role == "nccl":
        return "nccl_error"
    if rule.cause == "data_worker" and "Bus error" in text_of(entry):
        return "shared_memory"
    if rule.cause == "disk_full" and ("/dev/shm" in text_of(entry) or "shared memory" in text_of(entry)):
        return "shared_memory"
    return rule.cause or "exception"


def _candidate(
    cause: str, lines: list[LogLine], book: LogBook, chains: dict[tuple[str, int], LogLine], *, is_own: bool
) -> Candidate:
    listed = named_by(entry for entry in lines if entry.kind == "exception")
    ranks = _with_listed(ranks_of(lines) or listed, book)
    first = next((entry for entry in lines if entry.kind == "exception"), _first_that_states(lines))
    row = CAUSES.get(cause, CAUSES["exception"])
    rank_class = "mismatch" if row.kind == "hang" else "network" if row.blame == "link" else "error"
    rank_class = rank_class if is_own else "weak"
    text = _one_line(first.fields.get("message") if first.kind == "exception" else first.message, cause)
    if first.kind == "exception":
        name = ": ".join(part for part in (type_of(first), text) if part) or "an exception"
    else:
        name = text
    codes = list(dict.fromkeys(code for entry in lines[:8] for code in codes_in(text_of(entry))))
    name += f" ({', '.join(explained_code(code) for code in codes[:3])})" if codes else ""
    origin = chains.get((first.source, first.line))
    # The first error has no traceback if only its last line was printed, or if torch's watchdog repeated it.
    stacks = (own_frame_text(entry.text("traceback")) for entry in (first, *lines) if entry.kind == "exception")
    raised_at = next(filter(None, stacks), "")
    if origin is not None and origin.line > first.line:
        origin = None  # raised while this one was handled
    if origin is not None and _is_reraised(origin, first):
        raised_at, origin = own_frame_text(origin.text("traceback")) or raised_at, None
    at = raised_at
    everybody = bool(ranks) and book.world_size == len(ranks) > 1
    if origin is not None:
        before = f"after {type_of(origin)}: {_one_line(origin.fields.get('message'), cause)[:80]}"
        at = f"{at}, {before}" if at else before
    subject = f"All {len(ranks)} ranks" if everybody else who(ranks)
    reason = stated_reason(first) if cause in _WITH_REASONS else None
    template = (reason.text if reason is not None else "") or row.log_text or CAUSES["exception"].log_text
    what = template.format(who=subject, error=name, at=f" ({at})" if at else "")
    is_shared = row.blame == "outside" and len(ranks) > 1  # if only one rank has the error, its node may be to blame
    lies_between = is_shared or row.blame in ("link", "job") or _compares(text)
    reported_by, ranks = (ranks, ()) if lies_between else ((), ranks)
    evidence: dict[str, Any] = {
        "reported_by_ranks": list(reported_by),
        "error_type": type_of(first) or None,
        "message": text,
        "raised_at": raised_at or None,
        "codes": codes or None,
    }
    evidence |= {key: value for key, value in first.fields.items() if key not in _NO_EVIDENCE}
    kind = first.kind if first.kind in DO_OF_LINE else rule.kind if (rule := cause_of(text_of(first))) else ""
    evidence["do"] = DO_OF_LINE.get(kind) or (reason.do if reason is not None else None)
    if cause == "device_error":
        evidence["do"] = do_of_device(text_of(first), kind)
    if cause == "out_of_memory":
        evidence |= memory_of_message(str(first.fields.get("message") or first.message), own_pids=_pids_of(first, book))
    if cause == "device_assert":
        asserted = next(iter(book.of("assert_text")), None)
        evidence |= {"assertion": asserted.text("assertion"), "kernel": asserted.text("where")} if asserted else {}
    return from_lines(
        cause,
        lines,
        kind=row.kind,
        rank_class=rank_class,
        ranks=ranks,
        what=what,
        why=f"{first.place}: {'its traceback' if rank_class == 'error' and first.kind == 'exception' else name}",
        is_proven=is_own and row.is_proven_by_line and not _is_refused(first, cause) and not _is_supposed(first),
        evidence=evidence,
        collect=(reason.collect if reason is not None else ()) or row.collect,
    )


def _first_that_states(lines: list[LogLine]) -> LogLine:
    """The first line, except for lines that only announce a dump below them and end with a colon."""
    return next((entry for entry in lines if not entry.message.rstrip().endswith(":")), lines[0])


def _with_listed(ranks: tuple[int, ...], book: LogBook) -> tuple[int, ...]:
    """Add the ranks that a checkpoint's summary lists together with these; a paste may end before their tracebacks."""
    for entry in book.of("exception"):
        found = _FAILED_TOGETHER.search(entry.text("message"))
        listed = {int(rank) for rank in found[1].split(",") if rank.strip()} if found else set()
        if ranks and listed > set(ranks):
            return tuple(sorted(listed))
    return ranks


def _is_reraised(origin: LogLine, last: LogLine) -> bool:
    """Return True for an error of a pool's worker that the parent raises again, below the traceback of the worker."""
    texts = [str(entry.fields.get("message") or "").strip().splitlines()[:1] for entry in (origin, last)]
    return type_of(origin) == type_of(last) and texts[0] == texts[1]


def _pids_of(entry: LogLine, book: LogBook) -> set[int]:
    """Pids of the process that wrote a line: from the prefix of the line, and from lines that report the process's end.

    A launcher numbers its ranks from 0 on each host, so a local rank is used only if all lines are from one host.
    """
    found = {entry.pid} if entry.pid is not None else set()
    hosts = {one.host for one in book.lines if one.host}
    for line, _ in book.of_role("death", "exception", "victim", "root"):
        pid, rank = line.number("pid"), line.number("rank")
        if rank is None and len(hosts) <= 1:
            rank = line.number("local_rank")
        if pid is not None and entry.rank is not None and rank == entry.rank:
            found.add(pid)
    return found


def _compares(text: str) -> bool:
    """Return True if a message names several ranks, so it does not show which one is the culprit."""
    return len(set(_RANKS.findall(text))) > 1


def _one_line(text: object, cause: str) -> str:
    """The line of a message that names the cause, or else the message's first line; without CUDA's hints and closing
    punctuation."""
    text = str(text or "")
    text = text.replace("\\n", "\n") if "Traceback (most" in text else text  # the traceback may be quoted in one line
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = (line for line in sorted(lines[:20], key=lambda line: line.endswith(":")) if _names(line, cause))
    head = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    if any(one.endswith(" root error(s) found.") for one in lines[:2]):
        head = next((line.removeprefix("(0) ") for line in lines if line.startswith("(0) ")), head)  # a list by XLA
    line = next(named, head)
    line = line.split(" CUDA kernel errors might")[0]
    return cut(line, 160) if len(line) <= 160 else cut(_from_cause(line, cause), 160)


def _from_cause(line: str, cause: str) -> str:
    """The end of a long line, from the clause that names the cause; the whole line if its first 160 characters do."""
    if _names(line[:160], cause):
        return line
    places = [match.end() for match in _CLAUSE.finditer(line)]
    return next((f"…{line[at:]}" for at in reversed(places) if _names(line[at:], cause)), line)


def _names(text: str, cause: str) -> bool:
    return (rule := cause_of(text)) is not None and rule.cause == cause


def _is_supposed(entry: LogLine) -> bool:
    """Return True if an exception only supposes its cause. What torch supposes after a bus error is certain."""
    text = text_of(entry)
    rule = cause_of(text) if entry.kind == "exception" and "bus error" not in text.lower() else None
    return rule is not None and is_supposed(text, rule)


def _is_refused(entry: LogLine, cause: str) -> bool:
    """Return True for a refused connection or a failed full mesh of gloo: a peer that died may be the cause."""
    text = f"{entry.message} {entry.text('error')}".lower()
    return cause == "unreachable" and ("refused" in text or "connectfullmesh" in text)
