"""Silent corruption: whose parameters or optimizer state are not what they must be, and since when.

    found = judge([Fingerprint(rank=2, group="dp_replicate:0-3", tensor="model.head.weight", hash=7), ...])
    found.ranks, found.tensors, found.certain      # the guard asks this while the run lives
    findings = analyze(store)                      # the same from the records, afterwards

Two kinds of evidence, both exact (a bit that differs is a bit that somebody changed):

1. Replicas: ranks of a replica group hold the same bits. Where they differ, those outside the strict majority are the
   culprits. Without one (two replicas, or a tie) all of the group are suspects.
2. The chain: nobody writes to the training's state between two optimizer steps. A tensor that is not before a step
   what it was after the last one was changed by something else: its rank is the culprit, whatever the others hold.
   It also breaks the ties of 1.

A flip spreads: the gradients that a rank computes from a wrong parameter reach all others through the reduction. So
the state of all ranks is in doubt from the last check that was healthy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from analyzers.deaths.recovery_response import RESPONSE_EVENTS, Response, respond
from analyzers.finding import Finding
from analyzers.run.event_log import EventLog
from analyzers.source import Source, missing_tables
from probes.tape import event_kinds

__all__ = ["ALL_TENSORS", "Corruption", "CorruptionPolicy", "Fingerprint", "analyze", "judge"]

ALL_TENSORS = "(all)"
"""Name of the row that stands for all tensors of a group."""
_SHOWN_TENSORS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionPolicy:
    """Which records are looked at. There is no threshold: a difference of one bit is one."""

    since_step: int = 0
    """Only checks from this step on (the live view)."""
    settled_only: bool = False
    """Only checks after which all ranks have begun another step (the live view): what one rank has written may be
    there a moment before what the others have, and then its majority is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """One rank's checksum of one tensor; `expected` is the one after the last optimizer step, None if not taken."""

    rank: int
    group: str
    tensor: str
    hash: int
    expected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corruption:
    """What one check came to. `certain`: `ranks` are the culprits; else they are all that may be."""

    kind: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    certain: bool
    groups: tuple[str, ...]
    num_replicas: int
    broken_ranks: tuple[int, ...]

    @property
    def text(self) -> str:
        """Who and what, without a subject before it."""
        which = self.tensors[0] if self.tensors else "the state"
        more = f" and {len(self.tensors) - 1} more tensors" if len(self.tensors) > 1 else ""
        if self.kind == "fingerprint_chain_broken":
            return f"{which}{more} on {_ranks(self.ranks)} changed between two optimizer steps"
        if self.certain:
            how = "changed between two optimizer steps and differs" if self.broken_ranks else "differs"
            return f"{which}{more} on {_ranks(self.ranks)} {how} from its {self.num_replicas - 1} replicas"
        return f"{which}{more} differs between {_ranks(self.ranks)}, which should be replicas; no majority says which"


def judge(fingerprints: Iterable[Fingerprint]) -> Corruption | None:
    """What the fingerprints of all ranks at one check say; None if all is as it must be. Pure."""
    held: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    broken: dict[int, set[str]] = defaultdict(set)
    for one in fingerprints:
        held[one.group, one.tensor][one.hash].append(one.rank)
        if one.expected is not None and one.expected != one.hash:
            broken[one.rank].add(one.tensor)
    culprits: set[int] = set()
    suspects: set[int] = set()
    named: set[str] = set()
    differing = {place: hashes for place, hashes in held.items() if len(hashes) > 1}
    for (_, tensor), hashes in differing.items():
        odd, everybody = _odd_ones(hashes), {rank for ranks in hashes.values() for rank in ranks}
        changed = {rank for rank in everybody if tensor in broken[rank]}
        named.add(tensor)
        if odd or changed:
            culprits |= odd | changed
        else:
            suspects |= everybody
    broken_ranks = {rank for rank, tensors in broken.items() if tensors}
    if not differing and not broken_ranks:
        return None
    culprits |= broken_ranks
    named.update(*(broken[rank] for rank in broken_ranks))
    # The row of all tensors says no more than those that were looked at one by one.
    tensors = sorted(named - {ALL_TENSORS}) or [ALL_TENSORS]
    ranks = culprits or suspects
    return Corruption(
        kind="replica_mismatch" if differing else "fingerprint_chain_broken",
        ranks=tuple(sorted(ranks)),
        tensors=tuple(tensors),
        certain=bool(culprits),
        groups=tuple(sorted({group for group, _ in differing})),
        num_replicas=max((sum(map(len, hashes.values())) for hashes in differing.values()), default=1),
        broken_ranks=tuple(sorted(broken_ranks)),
    )


def _odd_ones(hashes: dict[int, list[int]]) -> set[int]:
    """Ranks that do not hold what the strict majority holds; none where there is no majority."""
    largest = max(hashes.values(), key=len)
    total = sum(map(len, hashes.values()))
    if 2 * len(largest) <= total:
        return set()
    return {rank for ranks in hashes.values() if ranks is not largest for rank in ranks}


def analyze(source: Source, policy: CorruptionPolicy | None = None) -> list[Finding]:
    """Findings of kind `replica_mismatch` and `fingerprint_chain_broken`, one an incident."""
    policy = policy or CorruptionPolicy()
    if missing_tables(source, "fingerprints"):
        return [_insufficient("no fingerprints were recorded (probes.fingerprint_interval)")]
    log = EventLog.load(source, RESPONSE_EVENTS)
    findings: list[Finding] = []
    before: tuple[int, Corruption] | None = None
    for attempt, step, turn, rows in _suspicious_checks(source, policy):
        found = judge(rows)
        if found is None:
            continue
        untouched = findings and findings[-1].evidence["restored_step"] is None
        if untouched and before == (attempt, found):  # nobody acted upon it: the same difference at each check
            findings[-1] = replace(findings[-1], last_step=step)
            continue
        before = (attempt, found)
        findings.append(_finding(source, log, attempt, step, turn, found))
    return findings


def _suspicious_checks(source: Source, policy: CorruptionPolicy) -> list[tuple[int, int, int, Sequence[Fingerprint]]]:
    """Checks in which anything differs, with all rows of those tensors: (attempt, step, turn, rows)."""
    found = source.rows(
        """
        WITH turns AS (
            SELECT *, row_number() OVER (PARTITION BY attempt, rank, step, replica_group, tensor ORDER BY taken_ns)
                   AS turn
            FROM fingerprints WHERE step >= ?
        ), odd AS (
            SELECT attempt, step, turn, replica_group, tensor FROM turns
            GROUP BY ALL
            HAVING count(DISTINCT hash) > 1 OR bool_or(coalesce(hash <> expected_hash, false))
        )
        SELECT t.attempt, t.step, t.turn, t.rank, t.replica_group, t.tensor, t.hash, t.expected_hash,
               max(t.taken_ns) OVER (PARTITION BY t.attempt, t.step, t.turn)
        FROM turns t SEMI JOIN odd USING (attempt, step, turn, replica_group, tensor)
        ORDER BY t.attempt, min(t.taken_ns) OVER (PARTITION BY t.attempt, t.step, t.turn), t.step, t.turn, t.rank
        """,
        [policy.since_step],
    )
    settled = dict(source.rows(_SETTLED)) if policy.settled_only else {}
    checks: dict[tuple[int, int, int], list[Fingerprint]] = {}
    for attempt, step, turn, rank, group, tensor, value, expected, taken_ns in found:
        if policy.settled_only and taken_ns >= settled.get(attempt, 0):
            continue
        one = Fingerprint(rank=rank, group=group or "", tensor=tensor or "", hash=value, expected=expected)
        checks.setdefault((attempt, step, turn), []).append(one)
    return [(*key, rows) for key, rows in checks.items()]


_SETTLED = """
    SELECT attempt, min(newest_ns) FROM (SELECT attempt, rank, max(start_ns) AS newest_ns FROM steps GROUP BY ALL)
    GROUP BY attempt
"""
"""When the last of an attempt's ranks began its newest step. What it wrote before is in the store by then."""


def _finding(source: Source, log: EventLog, attempt: int, step: int, turn: int, found: Corruption) -> Finding:
    ((healthy,),) = source.rows(
        "SELECT max(step) FROM fingerprints WHERE attempt = ? AND step < ?",
        [attempt, step],
    )
    response = _response(log, attempt, step)
    between = f"after step {healthy}" if healthy is not None else "before the first check"
    cause = found.tensors[0].partition(".")[0] if found.tensors[0] != ALL_TENSORS else "unknown"
    return Finding(
        analyzer="corruption",
        kind=found.kind,
        severity="warning" if response.restored_step is not None else "critical",
        status="fired" if found.certain else "suspect",
        ranks=found.ranks,
        first_step=step,
        last_step=step,
        cause={"model": "parameter", "optimizer": "optimizer"}.get(cause, "unknown"),
        summary=f"state of step {step}: {found.text}; it happened {between}; {response.text}",
        evidence={
            "tensors": list(found.tensors[:_SHOWN_TENSORS]),
            "num_tensors": len(found.tensors),
            "replica_groups": list(found.groups),
            "num_replicas": found.num_replicas if found.groups else 0,
            "chain_broken_ranks": list(found.broken_ranks),
            "last_healthy_step": healthy,
            "turn": turn,
            **response.evidence(),
        },
        advice="replica-mismatch" if found.kind == "replica_mismatch" else "fingerprint-chain-broken",
        attempt=attempt,
    )


def _response(log: EventLog, attempt: int, step: int) -> Response:
    """The rollback that followed: a check of a state is judged in one of the next steps."""
    for event in log.of(event_kinds.ROLLBACK, attempt=attempt):
        if step < event.integer("from_step") <= step + 3 and event.text("verdict") == "corruption":
            return respond(log, attempt=attempt, step=event.integer("from_step"))
    return respond(log, attempt=attempt, step=-1)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _insufficient(why: str) -> Finding:
    return Finding.insufficient("corruption", "replica_mismatch", f"silent corruption was not looked for: {why}")
