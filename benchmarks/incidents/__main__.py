"""Print the score of both halves.

python -m benchmarks.incidents
python -m benchmarks.incidents --half first_half --verdicts
"""

from __future__ import annotations

import argparse
from collections import Counter

from benchmarks.incidents.score import HALVES, confusion, load, score


def main() -> int:
    """Exit 1 if a verdict names a wrong culprit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=HALVES, help="only this half")
    parser.add_argument("--verdicts", action="store_true", help="print each incident's verdict")
    options = parser.parse_args()
    wrong = 0
    for half in [options.half] if options.half else HALVES:
        results = [score(incident) for incident in load(half)]
        outcomes = Counter(result.outcome for result in results)
        wrong += outcomes["wrong culprit"]
        print(f"\n## {half.replace('_', ' ').capitalize()}: {len(results)} incidents\n")
        print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
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
