"""Rounds of disjoint pairs, so that no link is measured while one of its ends is busy with another.

pair_rounds(8)          # 7 rounds: every pair of 8 once
pair_rounds(512)        # 9 rounds of 256 pairs: each node with 9 partners
repeat_rounds({(0, 3), (0, 5), (1, 2)})      # [[(0, 3), (1, 2)], [(0, 5)]]
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["LEAST_ROUNDS", "Pair", "pair_rounds", "repeat_rounds"]

Pair = tuple[int, int]
LEAST_ROUNDS = 7
"""If an end has at least this many partners, a slow end can be told from a slow link: all links of a slow end are slow.
With 8 ends all pairs are measured.
"""


def pair_rounds(num_ends: int) -> list[list[Pair]]:
    """Rounds of a round-robin tournament (circle method), evenly spread: `log2(num_ends)` of them, and at least seven.

    With an odd number one end rests in each round.
    """
    if num_ends < 2:
        return []
    ends = [*range(num_ends), *([-1] if num_ends % 2 else [])]
    count = len(ends)
    wanted = min(count - 1, max(LEAST_ROUNDS, math.ceil(math.log2(count))))
    rounds = []
    for number in range(wanted):
        turn = number * (count - 1) // wanted  # spread over the tournament: partners near and far
        circle = [ends[0], *(ends[1 + (index + turn) % (count - 1)] for index in range(count - 1))]
        pairs = [(circle[index], circle[count - 1 - index]) for index in range(count // 2)]
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if min(pair) >= 0))
    return rounds


def repeat_rounds(pairs: Iterable[Pair], *, most_rounds: int = 4) -> list[list[Pair]]:
    """Pack the given pairs into rounds of disjoint pairs, as far as they fit."""
    rounds: list[list[Pair]] = []
    for pair in sorted(set(pairs)):
        free = next((found for found in rounds if not any(set(pair) & set(other) for other in found)), None)
        if free is not None:
            free.append(pair)
        elif len(rounds) < most_rounds:
            rounds.append([pair])
    return rounds
