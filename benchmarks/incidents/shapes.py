"""Score verdicts on cases by topic in four forms, and on logs of healthy jobs.

    python -m benchmarks.incidents.shapes                 # the table; exit code 1 at a wrong culprit or a false alarm
    python -m benchmarks.incidents.shapes --verdicts

right: the cause, no rank except culprits, and the helpful fact. partly: only the cause. silent: no finding. wrong:
another cause, or a rank that is not a culprit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.report.wording.explained import next_step
from benchmarks.harness import argument_parser, markdown_head, markdown_row
from benchmarks.incidents.forms import FORMS, form
from benchmarks.incidents.printed import PROGRAMS, printed
from benchmarks.incidents.topics import CASES, FIRST_SCORE, Case

__all__ = ["alarms", "healthy_logs", "score_case"]

OUTCOMES = ("right", "partly", "silent", "wrong")


def score_case(case: Case, form_name: str) -> tuple[str, str]:
    """(outcome, verdict) of a case in a form."""
    with TemporaryDirectory(prefix="rankscope-shape-") as folder:
        for name, text in case.files.items():
            (Path(folder) / name).write_bytes(form(text, form_name, f"{case.name} {form_name}"))
        diagnosis = diagnose_files([Path(folder)])
    return _outcome(case, diagnosis), diagnosis.verdict


def _outcome(case: Case, diagnosis: Diagnosis) -> str:
    first = next(iter(diagnosis.fired), None)
    text = " ".join([diagnosis.verdict, *([next_step(first), str(first.evidence)] if first else [])])
    has_words = all(any(word in text for word in group) for group in case.words)
    if not case.causes:
        return "wrong" if first else "right" if has_words else "partly"
    if first is None:
        return "silent"
    cause = "non_finite" if first.kind == "non_finite" else first.cause
    if set(first.ranks) - set(case.ranks) or cause not in case.causes:
        return "wrong"
    return "right" if has_words else "partly"


def healthy_logs() -> Iterator[tuple[str, str]]:
    """(name, text): each program's log, complete and truncated in the middle."""
    for program in PROGRAMS:
        for seed in (1, 2):
            text = printed(program, steps=260, seed=seed, seconds=0.7 * seed, data_share=0.03 * seed)
            yield f"{program} {seed}", text
            yield f"{program} {seed}, cut", text[len(text) // 3 : 2 * len(text) // 3]


def alarms() -> list[tuple[str, str]]:
    """(name, verdict) of healthy logs with a finding."""
    found = []
    with TemporaryDirectory(prefix="rankscope-healthy-") as folder:
        for number, (name, text) in enumerate(healthy_logs()):
            path = Path(folder) / f"{number}.log"
            path.write_text(text, encoding="utf-8")
            diagnosis = diagnose_files([path])
            if diagnosis.fired:
                found.append((name, diagnosis.verdict))
    return found


def main() -> int:
    """Return 1 if there is a wrong verdict or a false alarm."""
    parser = argument_parser(__doc__)
    parser.add_argument("--half", choices=("open", "held-out"), help="only these cases")
    parser.add_argument("--verdicts", action="store_true", help="print each verdict")
    options = parser.parse_args()
    wrong = 0
    print(markdown_head("cases", *OUTCOMES))
    for half in ("open", "held-out"):
        if options.half not in (None, half):
            continue
        counts: Counter[str] = Counter()
        lines = []
        for case in CASES:
            for name in FORMS if case.is_held_out == (half == "held-out") else ():
                outcome, verdict = score_case(case, name)
                counts[outcome] += 1
                if outcome != "right" or options.verdicts:
                    lines.append(f"\n* {outcome}: {case.name}, {name}: {verdict}")
        if half in FIRST_SCORE:
            print(markdown_row(f"{half}, when first scored", *(FIRST_SCORE[half].get(o, 0) for o in OUTCOMES)))
        print(markdown_row(f"{half}, today", *(counts[o] for o in OUTCOMES)), *lines)
        wrong += counts["wrong"]
    found = alarms()
    print(
        f"\n{len(found)} alarms on {4 * len(PROGRAMS)} logs of healthy jobs.",
        *(f"\n* {name}: {text}" for name, text in found),
    )
    return int(bool(wrong or found))


if __name__ == "__main__":
    raise SystemExit(main())
