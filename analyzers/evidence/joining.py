"""Join the findings of logs, dumps and traces, so that one event is one finding.

    findings = join({"log": [...], "flight_recorder": [...], "kineto": [...]})
    findings = join_recorded(of_runs, of_files)     # findings of recorded runs, and of the logs of their ranks

1. The logs prove a cause, and the dumps show a hang. The cause explains the hang if both findings name a common rank,
   or if the dumps name no rank. The joined finding has the call of the dumps and the lines of the logs.
2. A rank that the dumps name takes precedence over a log line without a rank. A device error is joined with dumps that
   show a stuck device. Any other error is a separate suspicion.
3. A hang that the dumps prove replaces a suspicion from the logs, and takes over the lines of the logs.
4. If the logs prove how a rank ended, the note that this rank's dump is missing is dropped.
5. Stacks of the processes are evidence of a hang that dumps or logs show. Stacks alone are a suspicion.
6. If a recorded run lost a rank and a log says how that rank ended, the run's finding stays. The finding gets the lines
   of the log and facts that only a log has, such as the text of an assertion in a kernel.
7. If a run recorded a hang that a log or dumps show too, the run's finding stays, and the other finding becomes its
   evidence. The other finding must name one of the same ranks, or be only a suspicion.
8. If a plug-in's rows and the logs show the same event, only the finding of the logs is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from analyzers.finding import Finding, evidence_of
from analyzers.logs.wording import ANALYZER

__all__ = ["join", "join_recorded"]

_STANDSTILL = ("hang", "rank_lost")
_OF_LOG = ("assertion", "kernel", "holders", "others_bytes")
_CALL = ("op", "process_group", "seq", "caller", "waiting_ranks", "silent_s", "ranks_without_dump")


def join(found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Return all findings in one list. Findings about the same event are joined into one.

    `found`: the findings of each source, for example "log" or "flight_recorder".
    """
    suspects = [one for one in found.get("stacks", ()) if one.status == "suspect"]
    of_plugins = _not_in_logs(found.get("plugin", ()), found.get("log", ()))
    others = {source: findings for source, findings in found.items() if source != "stacks" or not suspects}
    joined = _joined({**others, "plugin": of_plugins})
    hang = next((one for one in joined if one.kind == "hang" and one.status in ("fired", "suspect")), None)
    if hang is None or not suspects:
        return [*joined, *suspects]
    with_stacks = replace(hang, evidence={**hang.evidence, "stack_groups": suspects[0].evidence["stack_groups"]})
    of_other_ranks = [one for one in suspects if one.ranks and hang.ranks and not set(one.ranks) & set(hang.ranks)]
    return [with_stacks if one is hang else one for one in joined] + of_other_ranks


def _joined(found: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    logs, dumps = list(found.get("log", ())), list(found.get("flight_recorder", ()))
    rest = [
        finding
        for source, findings in found.items()
        if source not in ("log", "flight_recorder")
        for finding in findings
    ]
    logged = next((one for one in logs if one.kind in _STANDSTILL and one.status in ("fired", "suspect")), None)
    dumped = next((one for one in dumps if one.kind in _STANDSTILL and one.status in ("fired", "suspect")), None)
    if logged is None or dumped is None:
        return [*logs, *dumps, *rest]
    logs.remove(logged)
    dumps.remove(dumped)
    # Rules 1 and 4.
    if logged.ranks and set(logged.ranks) & set(dumped.ranks):
        return [_merged(logged, dumped), *logs, *_settled(dumps, logged), *rest]
    if logged.status == "suspect" and dumped.status == "fired":  # rule 3
        return [_with_lines(dumped, logged), *logs, *dumps, *rest]
    # Rule 2.
    if logged.kind != "hang" and not logged.ranks and dumped.ranks and dumped.cause not in ("all_entered", "no_dump"):
        if logged.cause == "device_error" and dumped.cause == "device_stuck":
            return [_with_lines(dumped, logged), *logs, *dumps, *rest]
        return [dumped, replace(logged, status="suspect", severity="warning"), *logs, *dumps, *rest]
    # Rule 1: the dumps name no rank, or only suspect one.
    if not dumped.ranks or dumped.cause == "all_entered" or (logged.status == "fired" and dumped.status == "suspect"):
        return [_merged(logged, dumped), *logs, *dumps, *rest]
    if not logged.ranks and logged.kind == dumped.kind == "hang":
        return [_with_lines(dumped, logged), *logs, *dumps, *rest]
    return [logged, dumped, *logs, *dumps, *rest]


def join_recorded(recorded: Sequence[Finding], read: Sequence[Finding]) -> list[Finding]:
    """Return all findings, joined. `recorded`: findings of runs; `read`: findings of files."""
    runs, files = list(recorded), list(read)
    _join_hangs(runs, files)
    for logged in [one for one in files if one.kind == "rank_lost" and one.ranks and one.analyzer == ANALYZER]:
        same = [one for one in runs if one.kind == "rank_lost" and one.status == "fired" and one.ranks == logged.ranks]
        if not same:
            continue
        newest = same[-1]
        more = {
            name: logged.evidence[name] for name in _OF_LOG if logged.evidence.get(name) and name not in newest.evidence
        }
        runs[runs.index(newest)] = replace(
            newest,
            summary=f"{newest.summary} {logged.summary}"
            if logged.cause not in ("exception", newest.cause)
            else newest.summary,
            evidence={
                **evidence_of(newest),
                **more,
                "lines": evidence_of(logged).get("lines", [])[:8],
                "logs": logged.summary,
            },
        )
        files.remove(logged)
    return [*runs, *files]


def _join_hangs(runs: list[Finding], files: list[Finding]) -> None:
    """Move hangs of `files` into the evidence of matching hangs of `runs`."""
    hangs = [one for one in runs if one.kind == "hang" and one.status == "fired"]
    for shown in [one for one in files if one.kind == "hang" and one.status in ("fired", "suspect")]:
        if shown.analyzer != ANALYZER and "ranks_without_dump" not in shown.evidence:
            continue  # stacks and traces may be from a moment outside the run's records
        same = [one for one in hangs if set(one.ranks) & set(shown.ranks) or shown.status == "suspect"]
        if same:
            newest = runs.index(same[-1])
            where = "logs" if shown.analyzer == ANALYZER else "dumps"
            lines = {"lines": evidence_of(shown)["lines"][:8]} if evidence_of(shown).get("lines") else {}
            runs[newest] = replace(runs[newest], evidence={**runs[newest].evidence, **lines, where: shown.summary})
            hangs = [one for one in runs if one.kind == "hang" and one.status == "fired"]
            files.remove(shown)


def _not_in_logs(findings: Sequence[Finding], of_logs: Sequence[Finding]) -> list[Finding]:
    """Findings that do not match a finding of the logs in kind and ranks."""
    reported = [one for one in of_logs if one.status in ("fired", "suspect")]
    return [
        one
        for one in findings
        if not any(
            other.kind == one.kind and (other.ranks == one.ranks or not (one.ranks and other.ranks))
            for other in reported
        )
    ]


def _merged(logged: Finding, dumped: Finding) -> Finding:
    """The finding of the logs with the call from the dumps. If only the dumps are certain, the finding of the dumps
    with the lines of the logs."""
    if logged.status == "suspect" and dumped.status == "fired":
        return _with_lines(dumped, logged)
    call = {name: dumped.evidence[name] for name in _CALL if dumped.evidence.get(name) not in (None, [], "")}
    evidence = {**logged.evidence, **call, "dumps": dumped.summary}
    return replace(logged, evidence=evidence, cost_s=dumped.cost_s)


def _with_lines(dumped: Finding, logged: Finding) -> Finding:
    return replace(
        dumped,
        evidence={**evidence_of(dumped), "lines": evidence_of(logged).get("lines", [])[:8], "logs": logged.summary},
    )


def _settled(dumps: Sequence[Finding], logged: Finding) -> list[Finding]:
    """Return the findings of the dumps. If the logs prove how a rank ended, leave out those of status
    `insufficient_data`, which report only that a dump is missing or incomplete."""
    return [one for one in dumps if one.status != "insufficient_data" or logged.status != "fired"]
