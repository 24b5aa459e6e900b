"""Causes that processes state themselves: exceptions with their own text, exit codes and signals from launchers.

1. An exception of a rank is its own unless its text speaks of a peer (`victim` in the rules), it is a launcher's
   summary, or the rank's watchdog had given a call up before.
2. The same exception on several ranks is one candidate with all of them.
3. An exit code or signal counts for a rank of which no exception is known. SIGKILL leaves no text: it is the cause as
   far as the log goes, and `collect` says where the reason stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from analyzers.external.logs.book import LogBook, Said
from analyzers.external.logs.candidate import Candidate, who
from analyzers.external.logs.wording import COLLECT, WHAT
from analyzers.run.endings import LOST_PEER
from store.readers.logs.rules import Rule, cause_of

__all__ = ["Ended", "endings", "process_candidates"]

_LAUNCHERS = (
    "ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException", "SystemExit",
    "SignalException", "RendezvousGracefulExitError", "RendezvousConnectionError",
)  # fmt: skip
_BACKENDS = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionResetError", "BrokenPipeError")
_TIMEOUTS = ("Watchdog caught collective operation timeout", "timed out in blocking wait", "watchdog got stuck")
_UNIQUE_ID = "ing ncclUniqueId from ["
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_NETWORK = ("unreachable", "no_interface", "infiniband", "rendezvous", "port_in_use", "nccl_error")
_MISMATCH = ("mismatch", "mismatch_size", "model_differs", "not_entered")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INNER = re.compile(r"RayTaskError\((\w+)\)")
_SLURM_HOW = {"Killed": 9, "Out Of Memory": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Terminated": 15}


@dataclass(slots=True)
class Ended:
    """How ranks ended, by what they and their launchers wrote."""

    victims: dict[int, Said] = field(default_factory=dict)
    """Ranks that died of another, and the line that says so."""
    signals: dict[int, tuple[str, Said]] = field(default_factory=dict)
    exits: dict[int, tuple[int, Said]] = field(default_factory=dict)
    num_victim_lines: int = 0


def endings(book: LogBook) -> Ended:
    """Victims, signals and exit codes by rank."""
    ended = Ended()
    for said, _ in book.of_role("victim"):
        ended.num_victim_lines += 1
        if said.rank is not None:
            ended.victims.setdefault(said.rank, said)
    for said in book.of("exception"):
        if _is_victims(said) and said.rank is not None:
            ended.victims.setdefault(said.rank, said)
    for said in book.of("worker_failed", "root_failure", "process_terminated", "slurm_task"):
        _take_ending(said, ended)
    return ended


def _take_ending(said: Said, ended: Ended) -> None:
    code = said.number("exitcode")
    ranks = said.ranks() or ((said.rank,) if said.rank is not None else (-1,))
    how = said.text("how")
    number = _SLURM_HOW.get(how)
    signal = said.text("signal") or (_SIGNALS.get(number, "") if number else "")
    if how.startswith("Exited with exit code"):
        code = int(how.split()[-1])
    if not signal and code is not None and (code < 0 or 128 < code < 160):
        signal = _SIGNALS.get(-code if code < 0 else code - 128, f"signal {-code if code < 0 else code - 128}")
    for rank in ranks:
        if signal:
            ended.signals.setdefault(rank, (signal, said))
        elif code:
            ended.exits.setdefault(rank, (code, said))


def process_candidates(book: LogBook, ended: Ended) -> list[Candidate]:
    """Every cause that a process or its launcher states."""
    first_timeout = {said.rank: book.position(said) for said in reversed(list(book.of("watchdog_timeout")))}
    found: dict[tuple[str, str], list[tuple[Said, Rule | None]]] = {}
    for said in book.of("exception"):
        if _is_launchers(said) or _is_victims(said) or _is_stop(said):
            continue
        gave_up = first_timeout.get(said.rank)
        if gave_up is not None and gave_up < book.position(said):
            continue  # its watchdog had ended it already
        rule = cause_of(_text(said))
        if (rule is not None and rule.role == "numerics") or _UNIQUE_ID in _text(said):
            continue  # the line itself is judged
        cause = _cause(said, rule)
        key = _NUMBERS.sub("#", f"{_type(said)}: {said.text('message')[:120]}") if cause == "exception" else ""
        found.setdefault((cause, key), []).append((said, rule))
    for said, rule in book.of_role("root"):
        gave_up = first_timeout.get(said.rank)
        if rule.kind in _NOT_LINES or (gave_up is not None and gave_up < book.position(said)):
            continue
        found.setdefault((_cause(said, rule), ""), []).append((said, rule))
    candidates = [_candidate(cause, [said for said, _ in group], book) for (cause, _), group in found.items()]
    return [*candidates, *_deaths(book, ended), *_stops(book)]


_NOT_LINES = ("ras_state", "ray_memory", "collective_mismatch", "desync_not_joined", "monitored_barrier")


def _cause(said: Said, rule: Rule | None) -> str:
    if rule is None or rule.role == "victim":
        return "exception"
    if rule.role == "nccl":
        return "nccl_error"
    if rule.cause == "data_worker" and "Bus error" in _text(said):
        return "shared_memory"
    if rule.cause == "disk_full" and ("/dev/shm" in _text(said) or "shared memory" in _text(said)):
        return "shared_memory"
    return rule.cause


def _candidate(cause: str, lines: list[Said], book: LogBook) -> Candidate:
    ranks = tuple(sorted({said.rank for said in lines if said.rank is not None}))
    first = next((said for said in lines if said.kind == "exception"), lines[0])
    rank_class = "network" if cause in _NETWORK else "mismatch" if cause in _MISMATCH else "own"
    text = _one_line(first.fields.get("message") if first.kind == "exception" else first.message)
    name = f"{_type(first)}: {text}" if first.kind == "exception" else text
    at = _own_frame(first.text("traceback"))
    everybody = bool(ranks) and book.world_size == len(ranks) > 1
    subject = f"All {len(ranks)} ranks" if everybody else who(ranks)
    what = WHAT.get(cause, "{who} raised {error}").format(who=subject, error=name, at=f" ({at})" if at else "")
    evidence = {"error_type": _type(first) or None, "message": text, "raised_at": at or None}
    evidence |= {
        key: value for key, value in first.fields.items() if key not in ("traceback", "type", "message", "ranks")
    }
    if cause == "device_assert":
        asserted = next((said for said in book.of("assert_text")), None)
        evidence |= {"assertion": asserted.text("assertion"), "kernel": asserted.text("where")} if asserted else {}
    return Candidate(
        cause=cause,
        kind="hang" if cause in _MISMATCH else "rank_lost",
        rank_class=rank_class,
        ranks=ranks,
        what=what,
        why=f"{first.place}: {name}" if rank_class != "own" or first.kind != "exception" else f"{first.place}",
        lines=tuple(lines),
        is_proven=cause not in ("nccl_error", "infiniband", "rendezvous", "mismatch") and not _is_refused(first, cause),
        evidence=evidence,
        collect=COLLECT.get(cause, ()),
    )


def _one_line(text: object) -> str:
    """The first line of a message, without the standard hints of CUDA and without the end of its sentence."""
    line = next((line.strip() for line in str(text or "").splitlines() if line.strip()), "")
    line = line.split(" CUDA kernel errors might")[0]
    return (line if len(line) <= 160 else line[:157] + "...").rstrip(".;, ")


def _is_refused(said: Said, cause: str) -> bool:
    """A refused connection may be that of a peer which died, an unreachable address is the network's."""
    return cause == "unreachable" and "refused" in f"{said.message} {said.text('error')}".lower()


def _deaths(book: LogBook, ended: Ended) -> Iterator[Candidate]:
    raised = {said.rank for said in book.of("exception") if not _is_launchers(said)}
    gave_up = {said.rank for said in book.of("watchdog_timeout", "watchdog_stuck", "watchdog_abort")}
    groups: dict[str, list[tuple[int, Said]]] = {}
    for rank, (signal, said) in ended.signals.items():
        if signal == "SIGTERM" or (
            signal == "SIGABRT" and (gave_up or ended.num_victim_lines or rank in ended.victims)
        ):
            continue
        groups.setdefault(signal, []).append((rank, said))
    for signal, group in groups.items():
        ranks = tuple(sorted(rank for rank, _ in group if rank >= 0))
        without = "" if any(rank in raised for rank in ranks) else ", and no traceback says why"
        yield Candidate(
            cause="signal",
            kind="rank_lost",
            rank_class="death",
            ranks=ranks,
            what=f"{who(ranks)} died of {signal}{without}",
            why=f"{group[0][1].place}: {group[0][1].message[:160]}",
            lines=tuple(said for _, said in group),
            is_proven=signal != "SIGKILL",
            evidence={"signal": signal},
            collect=COLLECT.get(signal, COLLECT["signal"]),
        )
    explained = raised | gave_up | set(ended.victims)
    silent = [(rank, code, said) for rank, (code, said) in ended.exits.items() if not {rank, None} & explained]
    if silent:
        ranks = tuple(sorted(rank for rank, _, _ in silent if rank >= 0))
        yield Candidate(
            cause="exit",
            kind="rank_lost",
            rank_class="death",
            ranks=ranks,
            what=f"{who(ranks)} ended with exit code {silent[0][1]}, and its own error is not in these files",
            why=f"{silent[0][2].place}: {silent[0][2].message[:160]}",
            lines=tuple(said for *_, said in silent),
            is_proven=False,
            evidence={"exit_code": silent[0][1]},
            collect=COLLECT["exit"],
        )


def _stops(book: LogBook) -> Iterator[Candidate]:
    stops = [said for said in book.of("exception") if _is_stop(said)]
    if stops:
        yield Candidate(
            cause="cancelled",
            kind="rank_lost",
            rank_class="death",
            ranks=(),
            what="The job was interrupted from outside (Ctrl-C or SIGTERM)",
            why=f"{stops[0].place}: {_type(stops[0])}",
            lines=tuple(stops),
            severity="warning",
        )


def _type(said: Said) -> str:
    name = said.text("type").rsplit(".", 1)[-1]
    inner = _INNER.search(f"{said.text('type')} {said.message}")
    return inner[1] if inner else name


def _text(said: Said) -> str:
    return f"{said.text('type')}: {said.text('message')} {said.message}"


def _is_launchers(said: Said) -> bool:
    return _type(said) in _LAUNCHERS


def _is_stop(said: Said) -> bool:
    return _type(said) == "KeyboardInterrupt"


def _is_victims(said: Said) -> bool:
    """Whether an exception speaks of a peer's end or of a call that was given up, and of no cause of its own."""
    text = _text(said)
    rule = cause_of(text)
    if rule is not None:
        return rule.role == "victim" or (rule.role == "nccl" and LOST_PEER.search(text) is not None)
    return _type(said) in _BACKENDS or any(mark in text for mark in _TIMEOUTS) or LOST_PEER.search(text) is not None


def _own_frame(traceback: str) -> str:
    """The innermost line that is not in an installed package: `data/loader.py:41 in __getitem__`."""
    frames = [(m[1], m[2], m[3]) for m in _FRAME.finditer(traceback)]
    own = [f for f in frames if not re.search(r"(site|dist)-packages|/lib/python\d|<frozen|<string>", f[0])]
    chosen = (own or frames)[-1:]
    return "".join(f"{'/'.join(path.split('/')[-2:])}:{line} in {function}" for path, line, function in chosen)
