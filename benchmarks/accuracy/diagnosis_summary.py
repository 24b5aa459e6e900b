"""Counts and intervals over the outcomes of `benchmarks.accuracy.diagnosis`, and their table.

summary = summarize(outcomes)
summary["overall"]["recall"], summary["faults"]["kill"]
print_table(summary)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from analyzers.analysis import Analysis, analyses
from benchmarks.accuracy.labelled import EXPECTED, Expected

__all__ = ["Outcome", "analyses_of", "offered", "print_table", "summarize", "wilson"]

_COUNTED = ("seen", "kind", "rank", "cause", "place", "among", "suspect", "wrong")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Outcome of a case."""

    fault: str
    seed: int
    index: int
    layout: str
    num_ranks: int
    truth_ranks: list[int]
    onset: int
    ending: str
    seen: bool = False
    kind: bool = False
    rank: bool = False
    cause: bool = False
    place: bool = False
    among: bool = False
    suspect: bool = False
    contradiction: str = ""
    """A verdict of no problems together with a what-if gain beyond its error."""
    wrong: int = 0
    wrong_kinds: list[str] = field(default_factory=list)
    right: int = 0
    insufficient: bool = False
    steps: int | None = None
    seconds: float = 0.0
    diagnose_s: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    device: str = "cpu"


def analyses_of(expected: Expected) -> list[Analysis]:
    """Return the analyses of `diagnose` that can report a fault."""
    return [one for one in analyses() if set(one.kinds) & set(expected.kinds)]


def offered(expected: Expected) -> bool:
    """Return True if `diagnose` runs the analysis that a fault needs."""
    return expected.is_clean or bool(analyses_of(expected))


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share."""
    if not total:
        return (0.0, 1.0)
    z, share = 1.96, hits / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (max(0.0, middle - half), min(1.0, middle + half))


def summarize(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by fault, and over all faults."""
    table: dict[str, dict[str, Any]] = {}
    for name, expected in EXPECTED.items():
        runs = [outcome for outcome in outcomes if outcome.fault == name]
        if not runs and offered(expected):
            continue
        steps = sorted(outcome.steps for outcome in runs if outcome.steps is not None)
        row = {
            "ids": expected.ids, "offered": offered(expected), "clean": expected.is_clean, "runs": len(runs),
            **{key: sum(getattr(o, key) for o in runs) for key in (*_COUNTED, "right")},
            "errors": sum(bool(o.error) for o in runs), "insufficient": sum(o.insufficient for o in runs),
            "steps_median": steps[len(steps) // 2] if steps else None,
            "steps_p90": steps[min(len(steps) - 1, int(0.9 * len(steps)))] if steps else None,
        }  # fmt: skip
        table[name] = row
    faulty = [o for o in outcomes if not EXPECTED[o.fault].is_clean and offered(EXPECTED[o.fault])]
    clean = [o for o in outcomes if EXPECTED[o.fault].is_clean]
    outside = [o for o in faulty if EXPECTED[o.fault].places]
    right, wrong = sum(o.right for o in faulty), sum(o.wrong for o in [*faulty, *clean])
    named, caused = sum(o.rank for o in faulty), sum(o.cause for o in faulty)
    alarmed = sum(bool(o.wrong) for o in clean)
    overall = {
        "faulty_runs": len(faulty),
        "clean_runs": len(clean),
        "recall": _share(sum(o.kind for o in faulty), len(faulty)),
        "right_rank": _share(named, len(faulty)),
        "right_rank_among_several": _share(sum(o.among for o in faulty), len(faulty)),
        "suspect_without_rank": _share(sum(o.suspect for o in faulty), len(faulty)),
        "right_cause_of_named": _share(caused, named),
        "right_place_of_named": _share(sum(o.place for o in outside), sum(o.rank for o in outside)),
        "precision": _share(right, right + wrong),
        "clean_runs_with_false_alarm": _share(alarmed, len(clean)),
        "not_offered": [name for name, row in table.items() if not row["offered"]],
        "contradictions": sum(bool(o.contradiction) for o in outcomes),
        "errors": sum(bool(o.error) for o in outcomes),
    }
    return {"faults": table, "overall": overall}


def _share(hits: int, total: int) -> dict[str, Any]:
    low, high = wilson(hits, total)
    return {"hits": hits, "of": total, "share": hits / total if total else None, "low": low, "high": high}


def print_table(summary: dict[str, Any]) -> None:
    """Print the summary as a table."""
    counted = " ".join(f"{key:>{max(5, len(key))}}" for key in _COUNTED)
    print(f"{'fault':26} {'id':4} {'runs':>4} {counted}  {'recall (95 %)':17} steps p50/p90")
    for name, row in summary["faults"].items():
        head = f"{name:26} {row['ids']:4} {row['runs']:4}"
        if not row["offered"]:
            print(f"{head}  not offered")
            continue
        tail = f"  {row['errors']} errors" if row["errors"] else ""
        if row["clean"]:
            missing = f"  {row['insufficient']} say what is missing" if EXPECTED[name].insufficient else ""
            print(f"{head} {row['seen']:5} {'':37} {row['wrong']:5}{missing}{tail}")
            continue
        low, high = wilson(row["kind"], row["runs"])
        recall = f"{row['kind'] / row['runs']:.2f} ({low:.2f}-{high:.2f})"
        steps = f"{row['steps_median']}/{row['steps_p90']}" if row["steps_median"] is not None else "-"
        counts = " ".join(f"{row[key]:{max(5, len(key))}}" for key in _COUNTED)
        print(f"{head} {counts}  {recall:17} {steps}{tail}")
    print()
    for key, value in summary["overall"].items():
        if isinstance(value, dict):
            share = "-" if value["share"] is None else f"{value['share']:.4f}"
            print(
                f"{key:28} {share}  {value['hits']} of {value['of']}  (95 %: {value['low']:.4f} to {value['high']:.4f})"
            )
        else:
            print(f"{key:28} {', '.join(value) if isinstance(value, list) else value}")
