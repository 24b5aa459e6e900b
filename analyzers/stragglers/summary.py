"""Summary of a straggler finding: which ranks are slow, since when, by how much, and at what.

straggler_summary(suspect, "data", "", first_compared=6, side="", is_lower_bound=False, has_data_spans=True)
"""

from __future__ import annotations

from analyzers.stragglers.slow_place import PLACE_TEXTS, phase_text
from analyzers.stragglers.suspects import Suspect
from analyzers.wording import number, ranks_text, sentence

__all__ = ["straggler_summary"]

_WORK = {"data": "data loading", "host": "host delay", "sequence_length": "compute for longer sequences"}
"""Name of the slow work by cause; all other causes are compute."""
_CROWDED = "Other processes use the cores, so CPU time was compared instead of step time."
_NO_DATA_SPANS = " after the optimizer or in making the next batch"
"""Place for an attached loop without a data loader. A step of such a loop ends at the next forward pass, so the time to
make a batch counts as "after the optimizer" of the previous step."""


def straggler_summary(
    suspect: Suspect,
    place: str,
    phase: str,
    *,
    first_compared: int,
    side: str,
    is_lower_bound: bool,
    has_data_spans: bool,
) -> str:
    """Return the summary. `first_compared`: the first step after the warm-up. `side`: "device", "host" or empty.
    `is_lower_bound`: `excess_ms` is a lower bound."""
    worst, first, last = suspect.worst, suspect.first_step, suspect.last_step
    ranks = ranks_text(suspect.ranks)
    who = f"{suspect.node}, {ranks}," if suspect.node else ranks
    is_one = bool(suspect.node) or len(suspect.ranks) == 1
    has, was = ("has", "was") if is_one else ("have", "were")
    # A live finding stays on screen, so a last step in its text would soon be out of date.
    span = f"since step {first}" if suspect.ongoing else f"in steps {first} to {last}"
    paused = f"{100 * worst.paused_ratio:.0f} %"
    be = f"{has} been" if suspect.ongoing else was
    when = {
        "chronic": f"{has} been slow {_since(first, first_compared)}",
        "since": f"{has} been slow since step {first}",
        "transient": f"{was} slow from step {first} to {last}",
        "intermittent": f"{be} slow {len(worst.segments)} times {span}",
        "pauses": f"{has} paused in {paused} of the steps {span}"
        if suspect.ongoing
        else f"paused in {paused} of steps {first} to {last}",
        "rotating": f"{be} slow in turn {span}",
    }[suspect.pattern]
    # The excess is a lower bound if only calls were recorded: they show only the shortest wait of the peers.
    most = "at least " if is_lower_bound else "up to " if len(suspect.members) > 1 else ""
    measure = "" if worst.has_peers else " its former time"
    work = _WORK.get(suspect.cause, "compute")
    where = PLACE_TEXTS.get(place, "")
    if place == "after_optimizer" and not has_data_spans:
        where = _NO_DATA_SPANS
    if phase:
        where = phase_text(phase)
    work = "CPU time" if worst.by_cpu else work
    # If the rank computes longer and also waits for a core, the time is not only work; `suspect.why` gives the parts.
    work = "" if suspect.waits_for_core else f" of {work}"
    if side:
        where += f", on its {side}"
    excess = f"{most}+{number(worst.excess_ms)} ms{work} per step{where} ({round(worst.factor, 3):.2f}x{measure})"
    crowded = _CROWDED if worst.by_cpu else ""
    return " ".join(part for part in (sentence(f"{who} {when}: {excess}"), suspect.why, crowded) if part)


def _since(first: int, first_compared: int) -> str:
    if first < first_compared:  # the rank was slow in the warm-up steps, too, which are not compared
        return "from the first step" if first <= 1 else f"from step {first}, the first recorded"
    return f"since step {first}, the first one compared"
