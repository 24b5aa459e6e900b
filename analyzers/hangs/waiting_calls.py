"""Calls that the waiting ranks of a hang are in.

    waiting_calls(view, found)      # {"all_reduce #344 (group tp:0-3)": (0, 2, 3), "recv #7 from rank 5": (6,)}

In a large job most ranks do not wait in the call that the culprit has not entered, but in other calls, for ranks that
are waiting themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from analyzers.hangs.culprits import HangCause
from analyzers.hangs.wait_graph import WaitGraph
from analyzers.run.calls.snapshot import AttemptView

__all__ = ["MAX_CALLS", "MAX_LISTED", "evidence_of", "waiting_calls"]

MAX_CALLS = 8
"""Maximum number of calls that are listed, those with the most ranks."""
MAX_LISTED = 64
"""Maximum number of ranks that are listed per call."""


def waiting_calls(view: AttemptView, found: HangCause) -> dict[str, tuple[int, ...]]:
    """Waiting ranks by the text of their call: the call of `found` first, then those with the most ranks."""
    named = found.call.text if found.call is not None else ""
    graph = WaitGraph(view)
    ranks: dict[str, list[int]] = {}
    for rank in found.waiting:
        texts = [call.text for call in graph.heads(view.ranks[rank])] if rank in view.ranks else []
        if texts:
            ranks.setdefault(named if named in texts else texts[0], []).append(rank)
    ordered = sorted(ranks, key=lambda text: (text != named, -len(ranks[text]), ranks[text][0]))
    return {text: tuple(ranks[text]) for text in ordered}


def evidence_of(calls: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """The calls with the most ranks, for a finding."""
    return {text: list(ranks[:MAX_LISTED]) for text, ranks in list(calls.items())[:MAX_CALLS]}
