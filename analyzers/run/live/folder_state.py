"""State of a run's folder at the newest moment that its stores hold.

    with Store.open(run) as store:
        state = folder_state(run, store, stall_policy(run.manifest()), now_ns=time.time_ns())

`watch` may ingest only every few seconds, or less often if the ranks need the cores; that delay is not silence.
"""

from __future__ import annotations

from dataclasses import replace

from analyzers.run.live.state import RunState, run_state
from analyzers.run.policy import StallPolicy
from analyzers.source import Source
from probes.tape.rundir import RunDir
from store import is_watched
from store.published.copy_time import is_copy, stored_until_ns

__all__ = ["folder_state"]


def folder_state(run: RunDir, source: Source, policy: StallPolicy, *, now_ns: int) -> RunState:
    """The state of `run`. `source` reads the run's stores; `now_ns` is the current time (epoch nanoseconds)."""
    watched, copied, as_of_ns = is_watched(run.stores()), is_copy(run), stored_until_ns(run)
    state = run_state(source, policy, now_ns=as_of_ns, is_watched=watched, is_copy=copied)
    behind_s = (now_ns - as_of_ns) / 1e9
    if copied or not state.is_live or behind_s < policy.watch_late_s:
        return state
    late = f"watch last read the records {behind_s:.0f} s ago"
    return replace(state, reason=f"{state.reason}; {late}" if state.reason else late)
