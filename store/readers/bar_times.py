"""Recover the times of single steps from a progress bar's rate: tqdm smooths the rate, which hides a slow step.

    single_step_times([line.step_line.bar for line in lines])        # {index of the state: nanoseconds per step}

1. At each update tqdm computes exponential averages (0.7 old, 0.3 new) of steps and of seconds, and shows their ratio.
   The change from one rate to the next gives the time of the steps in between.
2. The times must add up to the elapsed seconds that the bar also shows. If they do not, because the bar smooths
   differently or the log lacks states, the printed rate is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from store.readers.logs.progress_bars import Bar

__all__ = ["single_step_times"]

NEW_RATIO = 0.3
"""tqdm's default `smoothing`."""
MIN_STATES = 10
APART_RATIO = 0.03
"""Maximum relative difference between the sum of the times and the elapsed time: rates are printed with three
digits.
"""
APART_S = 2.0
"""Maximum difference in seconds. It matters for short bars, because elapsed times are printed in whole seconds."""


def single_step_times(bars: Sequence[Bar]) -> dict[int, int]:
    """Nanoseconds per step for each state of one bar, in log order; states with an unknown time are left out."""
    found: dict[int, int] = {}
    for places in _runs(bars):
        found |= _times_of_run(bars, places)
    return found


def _runs(bars: Sequence[Bar]) -> Iterator[list[int]]:
    """Indices of the states from one start of the bar to the next, each step once."""
    places: list[int] = []
    for place, bar in enumerate(bars):
        if places and bar.step < bars[places[-1]].step:
            yield places
            places = []
        if not places or bar.step > bars[places[-1]].step:
            places.append(place)
    yield places


def _times_of_run(bars: Sequence[Bar], places: Sequence[int]) -> dict[int, int]:
    timed = [place for place in places if bars[place].duration_ns is not None]
    if len(timed) < MIN_STATES or any(bars[place].elapsed_s is None for place in timed):
        return {}
    found: dict[int, int] = {}
    first = bars[timed[0]]
    # If the log contains the start of the bar, the bar's elapsed time is about the time of its steps so far.
    is_begin = (first.elapsed_s or 0) * 1e9 < 2 * first.step * (first.duration_ns or 0) + 1e9
    before = first.step - 1 if timed[0] == places[0] else bars[places[places.index(timed[0]) - 1]].step
    steps = ns = sum_ns = 0.0
    if not is_begin or before > 0:  # the log begins in the middle of the bar: take its first rate as steady
        before, steps, ns = first.step, 1.0, float(first.duration_ns or 0)
        timed = timed[1:]
    begin_s = (first.elapsed_s or 0) if before == first.step else 0.0
    for place in timed:
        bar = bars[place]
        steps = NEW_RATIO * (bar.step - before) + (1 - NEW_RATIO) * steps
        smooth_ns = steps * (bar.duration_ns or 0)
        took_ns = (smooth_ns - (1 - NEW_RATIO) * ns) / NEW_RATIO
        if took_ns <= 0:
            return {}
        found[place] = int(took_ns / (bar.step - before))
        before, ns, sum_ns = bar.step, smooth_ns, sum_ns + took_ns
    shown_s = (bars[timed[-1]].elapsed_s or 0) - begin_s
    adds_up = abs(sum_ns / 1e9 - shown_s) <= max(APART_S, APART_RATIO * shown_s)
    return found if adds_up else {}
