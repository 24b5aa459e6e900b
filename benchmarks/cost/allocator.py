"""Memory that torch's allocator hands out on a CPU, from the profiler's events.

held_bytes, peak_bytes = allocated(lambda: model(tokens))
"""

from __future__ import annotations

from collections.abc import Callable

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

__all__ = ["allocated"]


def allocated(work: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that the result of `work` holds, and the peak while it ran; both beyond those allocated before.

    Each event states the allocator's total, which includes memory that other threads have freed without an event.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    results = profiler.profiler.kineto_results
    nodes, events = [*results.experimental_event_tree()], []
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag == _EventType.Allocation:
            events.append((node.start_time_ns, node.extra_fields.total_allocated, node.extra_fields.alloc_size))
    totals = [total - size for _, total, size in sorted(events)[:1]]  # before the first event
    del result
    if not totals:
        return 0, 0
    (start,) = totals
    last = max(events)[1]
    return last - start, max(total for _, total, _ in events) - start
