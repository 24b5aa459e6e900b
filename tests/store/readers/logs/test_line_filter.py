"""Lines with a literal, against looking for each literal in each line."""

from __future__ import annotations

import random

from store.readers.logs.line_filter import LineFilter, LiteralIndex, WindowLines, _patterns
from store.readers.logs.rules import load_rules

LITERALS = sorted({literal for rule in load_rules() for literal in rule.literals})


def naive(window: bytes, end: int, literals: list[bytes]) -> list[bytes]:
    return [line for line in window[:end].split(b"\n") if any(literal in line for literal in literals)]


def test_at_most_two_automata_search_for_all_rules() -> None:
    assert len(_patterns(frozenset(LITERALS))) <= 2, "each automaton is a pass over every log"


def test_every_line_with_a_literal_and_few_others() -> None:
    chooser = random.Random(4)
    parts = [*LITERALS, b"step 7", b"", b"\xff\x00\xfe", b"\r", "Größe".encode(), b"failed to find", b"NCCL INFO"]
    lines = [b" ".join(chooser.choices(parts, [1] * len(LITERALS) + [len(LITERALS) / 2] * 7, k=5)) for _ in range(3000)]
    window = b"\n".join(lines)
    end = len(window) - 100
    found = [window[begin:last].rstrip(b"\n") for begin, last in LineFilter(LITERALS).lines(WindowLines(window, end))]
    sought = naive(window, end, LITERALS)
    assert [line for line in found if line in set(sought)] == sought
    assert 500 < len(found) < 2500
    assert len(found) < 1.02 * len(sought)


def test_a_literal_that_was_dropped_is_not_found() -> None:
    wanted = LineFilter([b"aaaa", b"[x] (y)"])
    window = b"aaaa\nnothing\n[x] (y)\n"
    assert [window[begin:last] for begin, last in wanted.lines(WindowLines(window, len(window)))] == [
        b"aaaa\n",
        b"[x] (y)\n",
    ]
    wanted.drop(b"aaaa")
    assert [window[begin:last] for begin, last in wanted.lines(WindowLines(window, len(window)))] == [b"[x] (y)\n"]
    wanted.drop(b"[x] (y)")
    assert list(wanted.lines(WindowLines(window, len(window)))) == []


def test_a_literal_is_found_after_one_that_it_contains_was_dropped() -> None:
    wanted = LineFilter([b"Error", b"ValueError"])
    split = WindowLines(b"a ValueError\nan Error\n", 22)
    assert len(list(wanted.lines(split))) == 2
    wanted.drop(b"Error")
    assert [begin for begin, _ in wanted.lines(split)] == [0]


def test_a_window_without_a_line_end() -> None:
    assert list(LineFilter([b"aaaa"]).lines(WindowLines(b"xx aaaa", 7))) == [(0, 7)]


def test_the_literals_of_a_line_are_those_that_a_search_for_each_finds() -> None:
    chooser = random.Random(5)
    literals = [*(literal for rule in load_rules() for literal in rule.literals), b"abc", b"", b"Error: "]
    index = LiteralIndex(literals)
    parts = [*LITERALS, *(literal[1:] for literal in LITERALS), b"step 7", b"\xff\x00\xfe", b"abc"]
    lines = [b"".join(chooser.choices(parts, k=4)) for _ in range(500)]
    lines += [b"", b"abc", lines[0] + b"x" * 70_000, b"x" * 70_000 + lines[1]]  # also beyond what parts are taken of
    for line in lines:
        assert index.literals_in(line) == [place for place, literal in enumerate(literals) if literal in line]
