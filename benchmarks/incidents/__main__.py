"""Print the score of each round of incidents.

python -m benchmarks.incidents
python -m benchmarks.incidents --round first --verdicts
"""

from __future__ import annotations

import argparse
from collections import Counter

from benchmarks.incidents.score import FIRST_SCORE, ROUNDS, confusion, load, score


def main() -> int:
    """Exit 1 if a verdict names a wrong culprit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round", choices=ROUNDS, help="only this round")
    parser.add_argument("--verdicts", action="store_true", help="print each incident's verdict")
    options = parser.parse_args()
    wrong = 0
    for name in [options.round] if options.round else ROUNDS:
        results = [score(incident) for incident in load(name)]
        outcomes = Counter(result.outcome for result in results)
        wrong += outcomes["wrong culprit"]
        print(f"\n## {name.capitalize()} round: {len(results)} incidents\n")
        print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
        if name in FIRST_SCORE:
            before = ", ".join(f"{count} {outcome}" for outcome, count in FIRST_SCORE[name].items())
            print(f"When it was first scored, before its misses were read: {before}.")
        print(f"{sum(result.is_proven for result in results)} verdicts are proven, the others are suspicions.\n")
        print("| accepted cause | cause of the verdict | incidents |\n|---|---|---|")
        for accepted, found, count in confusion(results):
            print(f"| {accepted} | {found if found != accepted else 'the same'} | {count} |")
        for result in results:
            if options.verdicts or result.outcome != "right":
                print(f"\n{result.outcome}: {result.incident.name} ({', '.join(result.incident.causes)} "
                      f"{list(result.incident.ranks)})\n    {result.verdict}")  # fmt: skip
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
