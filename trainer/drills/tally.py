"""The result of a drill: one row per run, and the totals.

tally = Tally(); tally.add(row)
tally.recall, tally.precision, tally.right_rank, tally.unrecovered
tally.to_json()
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from trainer.drills.scenario import Scenario
from trainer.drills.score import Score

__all__ = ["Row", "Tally"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one run of a drill. `problem`: set if the run could not be judged."""

    scenario: Scenario
    score: Score
    wall_s: float
    run: Path | None = None
    problem: str = ""

    @property
    def seen(self) -> bool:
        """True if every fault was found with the right kind."""
        return all(answer.seen for answer in self.score.answers)

    @property
    def right_rank(self) -> bool:
        return all(answer.right_rank for answer in self.score.answers)

    @property
    def right_cause(self) -> bool:
        return all(answer.right_cause for answer in self.score.answers)

    @property
    def passed(self) -> bool:
        """True if the run has no problem."""
        answered = self.seen and self.right_rank and self.right_cause and not self.score.false_alarms
        return not self.problem and self.score.injected and self.score.recovered and answered

    @property
    def finding_s(self) -> float | None:
        """Seconds to the last required finding; None if a required finding was not reported live, or none is
        required."""
        times = [answer.finding_s for answer in self.score.answers]
        known = [time for time in times if time is not None]
        return max(known) if times and len(known) == len(times) else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems of the run, one line each."""
        found = [self.problem] if self.problem else []
        if not self.problem and not self.score.injected:
            found.append("The fault was not injected.")
        found += self.score.problems if not self.problem else ()
        for answer in self.score.answers:
            if not answer.seen:
                found.append(f"{answer.fault} was not found.")
            elif not answer.right_rank and answer.finding is not None:
                found.append(f"{answer.fault}: wrong ranks {list(answer.finding.ranks)}: {answer.finding.summary}")
            elif not answer.right_cause and answer.finding is not None:
                found.append(f"{answer.fault}: wrong cause {answer.finding.cause}: {answer.finding.summary}")
        found += [f"False alarm: {alarm.summary}" for alarm in self.score.false_alarms]
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        score = self.score
        return {
            "fault": self.scenario.name,
            "fault_ids": [kind.fault_id for kind in self.scenario.kinds],
            "mesh": self.scenario.mesh,
            "seed": self.scenario.seed,
            "injected": [fault.text for fault in self.scenario.faults],
            "was_injected": score.injected,
            "passed": self.passed,
            "answers": [
                {
                    "fault": answer.fault,
                    "rank": answer.rank,
                    "seen": answer.seen,
                    "right_rank": answer.right_rank,
                    "right_cause": answer.right_cause,
                    "finding_s": answer.finding_s,
                    "kind": answer.finding.kind if answer.finding else None,
                    "cause": answer.finding.cause if answer.finding else None,
                    "ranks": list(answer.finding.ranks) if answer.finding else [],
                    "summary": answer.finding.summary if answer.finding else "",
                }
                for answer in score.answers
            ],
            "false_alarms": [
                {"kind": s.kind, "cause": s.cause, "ranks": list(s.ranks), "summary": s.summary}
                for s in score.false_alarms
            ],
            "recovered": score.recovered and not self.problem,
            "ended": score.ended,
            "training_s": score.training_s,
            "steps_lost": score.steps_lost,
            "goodput": _ratio(score.useful_s, score.span_s),
            "wall_s": round(self.wall_s, 1),
            "run": str(self.run) if self.run else None,
            "problems": list(self.problems),
        }


@dataclass(slots=True)
class Tally:
    """The rows so far and their totals; a ratio without a denominator is None."""

    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)

    @property
    def recall(self) -> float | None:
        """Share of the faults with a finding of the right kind, live or post-mortem."""
        return _share(bool(answer.seen) for row in self.rows for answer in row.score.answers)

    @property
    def right_rank(self) -> float | None:
        """Share of the detected faults for which the finding names the right ranks."""
        return _share(answer.right_rank for row in self.rows for answer in row.score.answers if answer.seen)

    @property
    def right_cause(self) -> float | None:
        """Share of the detected faults for which the finding names the right cause."""
        return _share(answer.right_cause for row in self.rows for answer in row.score.answers if answer.seen)

    @property
    def precision(self) -> float | None:
        """Share of the findings, live or post-mortem, that are right in kind and rank."""
        right = sum(row.score.num_right for row in self.rows)
        wrong = sum(len(row.score.false_alarms) for row in self.rows)
        wrong += sum(bool(a.seen and not a.right_rank) for row in self.rows for a in row.score.answers)
        return right / (right + wrong) if right + wrong else None

    @property
    def unrecovered(self) -> int:
        """Number of runs that did not recover as their faults require."""
        return sum(bool(row.problem) or not row.score.recovered for row in self.rows)

    @property
    def goodput(self) -> float | None:
        """Time in steps that were kept, as a share of the time from the first to the last step, over all runs."""
        return _ratio(sum(row.score.useful_s for row in self.rows), sum(row.score.span_s for row in self.rows))

    @property
    def finding_s(self) -> float | None:
        """Median seconds from a fault to its live finding."""
        times = [a.finding_s for row in self.rows for a in row.score.answers if a.finding_s is not None]
        return median(times) if times else None

    @property
    def training_s(self) -> float | None:
        """Median seconds from a fault to the next good step, for runs that had to roll back or restart."""
        times = [row.score.training_s for row in self.rows if row.score.training_s is not None]
        return median(times) if times else None

    @property
    def failed(self) -> bool:
        """True if a fault was not injected or not found, or a run did not recover."""
        return self.unrecovered > 0 or any(not row.seen or not row.score.injected for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The totals first, then every run."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recall": _rounded(self.recall),
            "precision": _rounded(self.precision),
            "right_rank": _rounded(self.right_rank),
            "right_cause": _rounded(self.right_cause),
            "unrecovered": self.unrecovered,
            "goodput": _rounded(self.goodput),
            "median_finding_s": self.finding_s,
            "median_training_s": self.training_s,
            "num_runs": len(self.rows),
            "wall_s": round(sum(row.wall_s for row in self.rows), 1),
            "runs": [row.to_json() for row in self.rows],
        }


def _share(values: Iterable[bool]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
