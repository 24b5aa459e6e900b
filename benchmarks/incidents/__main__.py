"""Print the score of each round of incidents, as Markdown.

python -m benchmarks.incidents > docs/incidents.md
python -m benchmarks.incidents --round fourth --verdicts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.harness import argument_parser
from benchmarks.incidents.score import FIRST_MISSES, FIRST_SCORE, ROUNDS, Result, confusion, load, score

HEAD = """\
# Public incidents

    python -m benchmarks.incidents > docs/incidents.md

Public threads rewritten as minimal logs, with the accepted cause and, where the log shows one, the accepted rank
(`benchmarks/incidents/`, a file per topic). Each round after the first was scored once before its misses were fixed:
**only that first scoring is a test**. *Wrong culprit*: a rank that is not to blame was named or suspected (none is
today). *Proven*: a line states the verdict. *Rank named*: of the logs that show a rank. `--verdicts` prints all.

Synthetic logs of four launchers, with a known culprit:

    python -m benchmarks.incidents.played --seeds 1000
"""


def main() -> int:
    """Exit 1 if a verdict names a wrong culprit."""
    parser = argument_parser(__doc__)
    parser.add_argument("--round", choices=ROUNDS, help="only this round")
    parser.add_argument("--verdicts", action="store_true", help="print each incident's verdict")
    options = parser.parse_args()
    scored = {
        name: [score(incident) for incident in load(name)] for name in ([options.round] if options.round else ROUNDS)
    }
    print(HEAD)
    print("\n".join(_table(scored)))
    for name, results in scored.items():
        if lines := _round(name, results, show_all=options.verdicts):
            print("\n".join(lines))
    return int(any(result.outcome == "wrong culprit" for results in scored.values() for result in results))


def _table(scored: dict[str, list[Result]]) -> list[str]:
    lines = [
        "| round | incidents | right at first | wrong culprit | another cause | no cause | right today | proven "
        "| rank named |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, results in scored.items():
        today = Counter(result.outcome for result in results)
        known = [result for result in results if result.incident.ranks]
        cells = [
            name, len(results), _first(name, len(results)), today["right"],
            sum(result.is_proven for result in results),
            f"{sum(result.names_rank for result in known)} of {len(known)}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _first(name: str, number: int) -> str:
    """The four cells of a round's first scoring; the first round had none."""
    if name not in FIRST_SCORE:
        return "- | - | - | -"
    first = FIRST_SCORE[name]
    counts = [str(first.get(outcome, 0)) for outcome in ("wrong culprit", "other cause", "no cause")]
    return " | ".join([_share(first.get("right", 0), number), *counts])


def _share(right: int, number: int) -> str:
    return f"{right} ({right / number:.0%})"


def _pairs(pairs: Iterable[tuple[str, str, int]]) -> str:
    """`none instead of device_error (1), exception instead of exit (2)`."""
    return ", ".join(f"{found} instead of {accepted} ({count})" for accepted, found, count in pairs)


def _round(name: str, results: Sequence[Result], *, show_all: bool) -> list[str]:
    """Lines with today's wrong verdicts; with `show_all`, all verdicts and the misses of the first scoring."""
    lines = []
    if show_all and name in FIRST_MISSES:
        misses = ((accepted, found, count) for (accepted, found), count in FIRST_MISSES[name].items())
        lines.append(f"Misses of the first scoring: {_pairs(misses)}.\n")
    if others := [pair for pair in confusion(results) if pair[0] != pair[1]]:
        lines.append(f"Not right today: {_pairs(others)}.")
    for result in results:
        if show_all or result.outcome != "right":
            lines.append(
                f"\n* {result.incident.name} ({result.outcome}; accepted: {', '.join(result.incident.causes)}, ranks "
                f"{list(result.incident.ranks)}): {result.verdict}"
            )
    return [f"\n## {name.capitalize()} round\n", *lines] if lines else []


if __name__ == "__main__":
    raise SystemExit(main())
