"""Ends of ranks in the lines of ranks and launchers: signals, exit codes, victims, a stop from outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from analyzers.external.logs.book import LogBook, Said
from analyzers.external.logs.candidate import Candidate, who
from analyzers.external.logs.raised import is_launchers, is_stop, is_victims, type_of
from analyzers.external.logs.wording import COLLECT

__all__ = ["Ended", "death_candidates", "endings"]

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_SLURM_HOW = {"Killed": 9, "Out Of Memory": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Terminated": 15}


@dataclass(slots=True)
class Ended:
    """Ends of ranks, by the lines of ranks and launchers."""

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
        if is_victims(said) and said.rank is not None:
            ended.victims.setdefault(said.rank, said)
    for said in book.of("worker_failed", "root_failure", "process_terminated", "slurm_task", "signal_received"):
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


def death_candidates(book: LogBook, ended: Ended) -> list[Candidate]:
    """Deaths that no exception explains: by signal, by exit code, of a Ray worker, from outside."""
    return [*_deaths(book, ended), *_lost_actors(book), *_stops(book)]


def _deaths(book: LogBook, ended: Ended) -> Iterator[Candidate]:
    raised = {said.rank for said in book.of("exception") if not is_launchers(said)}
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
    explained |= {None} if any(book.of("nonfinite", "loss_scale_floor")) else set()
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


def _lost_actors(book: LogBook) -> Iterator[Candidate]:
    lines = list(book.of("ray_actor_died"))
    hung = any(book.of("watchdog_timeout", "watchdog_stuck", "gloo_timeout"))
    if lines and not hung:
        yield Candidate(
            cause="exit",
            kind="rank_lost",
            rank_class="death",
            ranks=(),
            what="A Ray worker died, and its own error is not in these files",
            why=f"{lines[0].place}: {lines[0].message[:160]}",
            lines=tuple(lines),
            is_proven=False,
            collect=COLLECT["ray"],
        )


def _stops(book: LogBook) -> Iterator[Candidate]:
    stops = [said for said in book.of("exception") if is_stop(said)]
    if stops:
        yield Candidate(
            cause="cancelled",
            kind="rank_lost",
            rank_class="death",
            ranks=(),
            what="The job was interrupted from outside (Ctrl-C or SIGTERM)",
            why=f"{stops[0].place}: {type_of(stops[0])}",
            lines=tuple(stops),
            severity="warning",
        )
