"""Evidence and next step of hangs, ranks out of sync and silent nodes, one sentence each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from analyzers.causes import next_step
from analyzers.finding import Finding, evidence_of
from analyzers.hangs.waiting_calls import MAX_CALLS, MAX_LISTED
from analyzers.run.calls.recorded_calls import MAX_NAME
from analyzers.run.ends.thread_errors import check_thread_first
from analyzers.wording import counted, group_text, number, ranks_text, sentence

__all__ = ["NEXT", "WHY"]


def _why_hang(finding: Finding) -> str:
    facts = evidence_of(finding)
    waiting, silent_s = facts.get("waiting_ranks") or [], facts.get("silent_s")
    silent = f" for {number(silent_s, 4)} s" if silent_s else ""
    group = _cut(group_text(str(facts.get("process_group"))))
    call = f" in {facts['op']} #{facts['seq']} (group {group})" if "op" in facts else ""
    caller = f" at {facts['caller']}" if facts.get("caller") else ""
    if not waiting and facts.get("odd_pids"):
        return sentence(f"{counted(facts['stack_groups'][0]['num_ranks'], 'process')} waited")
    if not waiting:
        return f"{sentence(f'no rank made progress{call}{caller}{silent}')} {_limit(finding)}".strip()
    listed = facts.get("waiting_calls") or {}  # also contains calls of ranks that turned out to be culprits
    calls = {text: there for text, ranks in listed.items() if (there := set(ranks) & set(waiting))}
    text = next(iter(calls), "")
    who, elsewhere = counted(len(waiting), "rank"), ""
    if text:
        call, caller = f" in {text}", caller if text.startswith(f"{facts.get('op')} #{facts.get('seq')} ") else ""
        who, elsewhere = _counts(listed, calls, text, len(waiting))
    who = f"{who} waited{call}{caller}{silent}{elsewhere}"
    return f"{sentence(who)} {_limit(finding)}".strip()


def _counts(
    listed: Mapping[str, Sequence[int]], calls: Mapping[str, Collection[int]], text: str, num_waiting: int
) -> tuple[str, str]:
    """Text on how many ranks wait in the call `text`, and in other calls. `listed` may lack some calls and ranks."""
    others = [other for other in calls if other != text]
    num_here = len(calls[text])
    if len(listed[text]) >= MAX_LISTED:
        if len(listed) >= MAX_CALLS or any(len(listed[other]) >= MAX_LISTED for other in others):
            return f"at least {counted(num_here, 'rank')}", ", the rest in other calls"
        num_here = num_waiting - sum(len(calls[other]) for other in others)
    num_elsewhere = num_waiting - num_here
    return counted(num_here, "rank"), f", {counted(num_elsewhere, 'rank')} in other calls" if num_elsewhere else ""


def _limit(finding: Finding) -> str:
    """State the silence after which this run reports a hang, and why a shorter one was reported."""
    silent_s, limit_s = finding.evidence.get("silent_s"), finding.evidence.get("limit_s")
    if not isinstance(limit_s, (int, float)):
        return ""
    limit = f"{number(limit_s, 4)} s"
    if isinstance(silent_s, (int, float)) and silent_s > limit_s:
        return f"Hang threshold here: {limit}."
    if finding.cause == "skipped" or finding.cause.startswith("mismatch"):
        return f"Differing calls prove a hang even before the threshold of {limit}."
    if finding.cause == "stopped":
        return f"A stopped process proves a hang even before the threshold of {limit}."
    return f"The ranks were ended before the threshold of {limit}."


def _cut(name: str) -> str:
    return name[:MAX_NAME]


def _next_hang(finding: Finding) -> str:
    if "link_rank" in finding.evidence:
        return f"Check the network adapter, cable and switch port between the nodes of {ranks_text(finding.ranks)}."
    absent = evidence_of(finding).get("absent_ranks") or ()
    step = next_step(
        finding.cause,
        [rank for rank in finding.ranks if rank not in absent],
        caller=f" at {finding.evidence['caller']}" if finding.evidence.get("caller") else "",
        stack=_stuck_line(finding),
        unseen=evidence_of(finding).get("unseen_ranks") or (),
        devices_first=bool(finding.evidence.get("host_only")),
        processes=evidence_of(finding).get("odd_pids") or (),
    )
    if pids := evidence_of(finding).get("pids"):
        host = str(finding.evidence.get("host"))[:MAX_NAME]
        step += f" `kill -CONT {' '.join(map(str, pids))}` on {host} continues {'it' if len(pids) == 1 else 'them'}."
    return check_thread_first(finding) + step


def _stuck_line(finding: Finding) -> str:
    """Innermost line of the stack of the only culprit: " (in train.py:77 wait_for_licence)"; empty if unknown."""
    facts = evidence_of(finding)
    key, culprits = ("ranks", list(finding.ranks)) if finding.ranks else ("pids", list(facts.get("odd_pids") or ()))
    for group in facts.get("stack_groups") or []:
        if culprits and list(group.get(key) or []) == culprits and group.get("frames"):
            return f" (in {str(group['frames'][0])[:MAX_NAME]})"
    return ""


def _why_node_silent(finding: Finding) -> str:
    facts = finding.evidence
    after = "it reports again" if facts.get("reports_again") else "nothing has arrived since"
    return f"Its watch reports once a second, but sent nothing for {number(facts.get('silent_s'))} s, and {after}."


def _next_node_silent(finding: Finding) -> str:
    if finding.cause == "reports_again":
        return "Check the load of that node and the network between it and the leader."
    return "Ping the node, and read the logs of its watch and kernel: the ranks there may still train."


def _why_desync(finding: Finding) -> str:
    facts = finding.evidence
    off = counted(facts.get("num_calls"), "call")
    before, since = (counted(facts.get(name), "step") for name in ("steps_before", "steps_since"))
    return f"The group's call numbers agreed for {before}, and have differed by {off} in the {since} since then."


def _next_desync(finding: Finding) -> str:
    caller = f" at {finding.evidence['caller']}" if finding.evidence.get("caller") else ""
    before = f"resume from a checkpoint before step {finding.first_step}"
    return f"Find the branch that depends on the rank{caller}, and {before}."


def _why_standstill(finding: Finding) -> str:
    facts = evidence_of(finding)
    waited = facts.get("waiting_ranks") or []
    others = f"{ranks_text(waited)} waited in collectives meanwhile" if waited else "no rank waited for another"
    return f"That exceeds this run's hang threshold, and {others}."


def _next_standstill(finding: Finding) -> str:
    who = ranks_text(finding.ranks) if finding.ranks else "all ranks"
    if finding.cause == "compile":
        failed_guard = finding.evidence.get("recompiled")
        guard = f" The guard that failed: {failed_guard}." if failed_guard else ""
        return f"Keep shapes and flags the same on all ranks, so that {who} need not compile again.{guard}"
    place = finding.evidence.get("place")
    return f"Find out what {who} did {place} at that time (a file system, a lock, a stopped process)."


WHY: Mapping[str, Callable[[Finding], str]] = {
    "hang": _why_hang,
    "desync": _why_desync,
    "node_silent": _why_node_silent,
    "standstill": _why_standstill,
}
NEXT: Mapping[str, Callable[[Finding], str]] = {
    "hang": _next_hang,
    "desync": _next_desync,
    "node_silent": _next_node_silent,
    "standstill": _next_standstill,
}
