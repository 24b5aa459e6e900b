"""Score of verdicts against the accepted causes of incidents.

results = [score(incident) for incident in load("first")]
results[0].outcome     # "right", "wrong culprit", "other cause" or "no cause"
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from analyzers.evidence.diagnose_files import diagnose_files

__all__ = ["FIRST_MISSES", "FIRST_SCORE", "ROUNDS", "Incident", "Result", "confusion", "load", "score"]

ROUNDS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth", "thirteenth",
)  # fmt: skip
"""Rules were written from the first. Each later one was collected when the rules stood, and scored once before its
misses were read: `FIRST_SCORE`. The misses were put right afterwards: today's score is no test."""
FIRST_SCORE = {
    "second": {"right": 24, "wrong culprit": 3, "other cause": 3, "no cause": 1},
    "third": {"right": 24, "wrong culprit": 2, "other cause": 1, "no cause": 3},
    "fourth": {"right": 21, "wrong culprit": 2, "other cause": 7, "no cause": 8},
    "fifth": {"right": 10, "wrong culprit": 1},
    "eighth": {"right": 7, "other cause": 2, "no cause": 1},
    "seventh": {"right": 23, "wrong culprit": 1, "no cause": 3},
    "ninth": {"right": 18, "other cause": 8, "no cause": 4},
    "tenth": {"right": 10, "other cause": 1, "no cause": 4},
    "eleventh": {"right": 26, "no cause": 4},
    "twelfth": {"right": 25, "other cause": 3, "no cause": 2},
    "thirteenth": {"right": 6, "other cause": 1, "no cause": 3},
    "sixth": {"right": 17, "wrong culprit": 2, "other cause": 6, "no cause": 5},
}
"""Outcomes at the first scoring, by the rules of that moment."""
FIRST_MISSES = {
    "second": {
        ("device_error", "none"): 1, ("not_entered", "all_entered"): 1, ("exit", "exception"): 2,
        ("duplicate_gpu", "duplicate_gpu, of a rank that only reported it"): 3,
    },
    "third": {
        ("signal", "none"): 2, ("non_finite", "exit"): 1, ("not_entered", "none"): 1,
        ("nccl_error", "nccl_error, of a rank that only reported it"): 2,
    },
    "fourth": {
        ("exception", "none"): 1, ("exit", "none"): 1, ("infiniband", "none"): 2, ("launch_failed", "none"): 1,
        ("no_interface", "none"): 1, ("non_finite", "none"): 1, ("signal", "none"): 1,
        ("all_entered", "connection_lost"): 1, ("locked_memory", "host_out_of_memory"): 1,
        ("no_interface", "exception"): 1, ("node_failed", "exit"): 1, ("non_finite", "exception"): 1,
        ("out_of_memory", "device_error"): 1, ("unreachable", "connection_lost"): 1,
        ("all_entered", "exception, of a rank that only waited"): 1,
        ("exit", "exception, of ranks that only waited"): 1,
    },
    "fifth": {("nccl_error", "signal, suspected of a rank that only reported it"): 1},
    "sixth": {
        ("rendezvous", "none"): 1, ("out_of_memory", "none"): 1, ("infiniband", "none"): 2,
        ("all_entered", "none: the analysis itself failed"): 1, ("rendezvous", "exception"): 2,
        ("out_of_memory", "exception"): 1, ("device_setup", "exception"): 2, ("device_assert", "all_entered"): 1,
        ("nccl_error", "device_error, of a rank that only reported it"): 1,
        ("not_entered", "not_entered, of the rank that reported it"): 1,
    },
    "eighth": {("non_finite", "exception"): 2, ("preempted", "none"): 1},
    "tenth": {
        ("connection_lost", "none"): 1, ("launch_failed", "none"): 1, ("signal", "none"): 2,
        ("not_entered", "connection_lost"): 1,
    },
    "eleventh": {
        ("all_entered", "none"): 1, ("connection_lost", "none"): 1, ("nccl_error", "none"): 1,
        ("watchdog_stuck", "none"): 1,
    },
    "twelfth": {
        ("device_error", "none"): 1, ("exception", "none"): 1, ("launch_failed", "exception"): 1,
        ("port_in_use", "exception"): 1, ("signal", "connection_lost"): 1,
    },
    "thirteenth": {
        ("data_worker", "exception"): 1, ("preempted", "none"): 1, ("rendezvous", "none"): 1, ("signal", "none"): 1,
    },
    "ninth": {
        ("all_entered", "none"): 1, ("device_error", "none"): 1, ("mismatch_size", "none"): 1,
        ("rendezvous", "none"): 1,
        ("disk_full", "exception"): 1, ("evicted", "preempted"): 1, ("infiniband", "exit"): 1,
        ("mismatch", "skipped"): 1, ("mismatch_operation", "all_entered"): 1, ("mismatch_size", "all_entered"): 1,
        ("unreachable", "nccl_error"): 2,
    },
    "seventh": {
        ("mismatch", "exception, of the rank that reported it"): 1, ("nccl_error", "none"): 1,
        ("launch_failed", "none"): 1, ("rendezvous", "none"): 1,
    },
}  # fmt: skip
"""(accepted cause, what the verdict said instead) at the first scoring."""
FOLDER = Path(__file__).parent
Outcome = Literal["right", "wrong culprit", "other cause", "no cause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A thread, rewritten. `ranks` are those to blame; empty where the log cannot show whose it was."""

    name: str
    link: str
    accepted: str
    causes: tuple[str, ...]
    ranks: tuple[int, ...]
    files: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Verdict on an incident."""

    incident: Incident
    outcome: Outcome
    cause: str
    ranks: tuple[int, ...]
    is_proven: bool
    verdict: str

    @property
    def names_rank(self) -> bool:
        """Return True if it names a rank that is to blame."""
        return bool(self.ranks) and set(self.ranks) <= set(self.incident.ranks)


def load(name: str) -> list[Incident]:
    """The incidents of a round."""
    with (FOLDER / f"{name}.toml").open("rb") as file:
        listed = tomllib.load(file).get("incident", [])
    return [
        Incident(
            name=one["name"], link=one["link"], accepted=one["accepted"], causes=tuple(one["causes"]),
            ranks=tuple(one["ranks"]), files=dict(one["files"]),
        )
        for one in listed
    ]  # fmt: skip


def score(incident: Incident) -> Result:
    """Diagnose the incident's files. A rank that is named and not to blame is wrong, also as a suspect."""
    with TemporaryDirectory(prefix="rankscope-incident-") as folder:
        for name, text in incident.files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        diagnosis = diagnose_files([Path(folder)])
    first = next(iter(diagnosis.fired), None)
    if first is None:
        return _result(incident, "no cause", "none", (), False, diagnosis.verdict)
    cause = "non_finite" if first.kind == "non_finite" else first.cause
    if set(first.ranks) - set(incident.ranks):
        outcome: Outcome = "wrong culprit"
    else:
        outcome = "right" if cause in incident.causes else "other cause"
    return _result(incident, outcome, cause, first.ranks, first.status == "fired", diagnosis.verdict)


def _result(
    incident: Incident, outcome: Outcome, cause: str, ranks: tuple[int, ...], is_proven: bool, verdict: str
) -> Result:
    return Result(incident=incident, outcome=outcome, cause=cause, ranks=ranks, is_proven=is_proven, verdict=verdict)


def confusion(results: Sequence[Result]) -> list[tuple[str, str, int]]:
    """(accepted cause, cause of the verdict, number); a verdict that is one of the accepted counts as the first."""
    pairs = Counter(
        (result.incident.causes[0], result.incident.causes[0] if result.outcome == "right" else result.cause)
        for result in results
    )
    return [(accepted, found, count) for (accepted, found), count in sorted(pairs.items())]
