"""Score of verdicts against the accepted causes of incidents.

results = [score(incident) for incident in load("first")]
results[0].outcome     # "right", "wrong culprit", "other cause" or "no cause"
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from analyzers.evidence.diagnose_files import diagnose_files

__all__ = ["FIRST_MISSES", "FIRST_SCORE", "ROUNDS", "Incident", "Result", "confusion", "load", "score"]

FOLDER = Path(__file__).parent
_ROUNDS = tomllib.loads((FOLDER / "rounds.toml").read_text(encoding="utf-8"))
ROUNDS = tuple(_ROUNDS)
FIRST_SCORE: dict[str, dict[str, int]] = {name: one["score"] for name, one in _ROUNDS.items() if "score" in one}
"""Outcomes at the first scoring, with the rules of that time."""
FIRST_MISSES = {
    name: {(accepted, instead): count for accepted, instead, count in one["misses"]}
    for name, one in _ROUNDS.items()
    if "misses" in one
}
"""(accepted cause, cause in the verdict) at the first scoring."""
Outcome = Literal["right", "wrong culprit", "other cause", "no cause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A rewritten thread. `ranks`: the culprits; empty if the log cannot show them."""

    name: str
    round: str
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
        """Return True if it names a culprit."""
        return bool(self.ranks) and set(self.ranks) <= set(self.incident.ranks)


def load(name: str) -> list[Incident]:
    """The incidents of a round."""
    return [incident for incident in _all_incidents() if incident.round == name]


@cache
def _all_incidents() -> tuple[Incident, ...]:
    return tuple(
        Incident(
            name=one["name"], round=one["round"], link=one["link"], accepted=one["accepted"],
            causes=tuple(one["causes"]), ranks=tuple(one["ranks"]), files=dict(one["files"]),
        )
        for path in sorted(FOLDER.glob("*.toml"))
        for one in tomllib.loads(path.read_text(encoding="utf-8")).get("incident", ())
    )  # fmt: skip


def score(incident: Incident) -> Result:
    """Diagnose the incident's files. Naming a rank that is not a culprit is wrong, even as a suspect."""
    with TemporaryDirectory(prefix="rankscope-incident-") as folder:
        for name, text in incident.files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        diagnosis = diagnose_files([Path(folder)])
    outcome: Outcome = "no cause"
    cause, ranks, is_proven = "none", (), False
    if first := next(iter(diagnosis.fired), None):
        cause = "non_finite" if first.kind == "non_finite" else first.cause
        ranks, is_proven = first.ranks, first.status == "fired"
        outcome = "right" if cause in incident.causes else "other cause"
        if set(ranks) - set(incident.ranks):
            outcome = "wrong culprit"
    return Result(
        incident=incident, outcome=outcome, cause=cause, ranks=ranks, is_proven=is_proven, verdict=diagnosis.verdict
    )


def confusion(results: Sequence[Result]) -> list[tuple[str, str, int]]:
    """(accepted cause, cause in the verdict, number). If several causes are accepted, a verdict with any of them counts
    under the first.
    """
    pairs = Counter(
        (result.incident.causes[0], result.incident.causes[0] if result.outcome == "right" else result.cause)
        for result in results
    )
    return [(accepted, found, count) for (accepted, found), count in sorted(pairs.items())]
