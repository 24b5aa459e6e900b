"""Record replays of CUDA graphs: an event at each graph's first replay, and the number of replays at the end.

    undo = record_replays(recorder)        # then every `torch.cuda.CUDAGraph.replay` counts

A captured graph runs without Python: no hook of a module, optimizer or process group is called, so a step inside a
graph has no phases. The event explains that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from ..fail_open import record_error
from ..tape import event_kinds

if TYPE_CHECKING:
    from ..tape_recorder import TapeRecorder

__all__ = ["record_replays"]


def record_replays(recorder: TapeRecorder) -> Callable[[], None]:
    """Count replays from now on, and write the numbers when the recorder closes. Returns a function that stops it."""
    graphs: Any = torch.cuda.CUDAGraph
    real = graphs.replay
    counts: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
    totals: list[list[int]] = []  # counts of all graphs, also of those that have been deleted

    @functools.wraps(real)
    def replay(graph: Any) -> Any:
        try:
            count = counts.get(graph)
            if count is None:
                count = counts[graph] = [0]
                totals.append(count)
                recorder.event(event_kinds.GRAPH_REPLAYS, graph=len(totals), replays=1)
            count[0] += 1
        except Exception as error:
            record_error("graph_replays", error)
        return real(graph)

    def write() -> None:
        for number, (count,) in enumerate(totals, 1):
            recorder.event(event_kinds.GRAPH_REPLAYS, graph=number, replays=count)
        totals.clear()
        counts.clear()

    graphs.replay = replay
    recorder.at_close.append(write)

    def undo() -> None:
        if graphs.replay is replay:  # otherwise other code has wrapped it since, and still calls this wrapper
            graphs.replay = real

    return undo
