"""Open and diagnose a run at any time, even while it is ending.

    with diagnosed_run(RunDir.open(path)) as (store, diagnosis):
        diagnosis.verdict

While a run is ending, its records are incomplete: ranks raise errors of broken connections before the launcher has
recorded which rank died. So the verdict waits a few seconds for the last records, includes what `watch` has not
ingested yet, and says "Still reading" if the end of a rank is still unexplained. If a query finds the store damaged, it
is set aside and rebuilt from the tapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from analyzers.diagnose import Diagnosis, diagnose
from analyzers.finding import Finding
from analyzers.wording import ranks_text
from probes.tape.rundir import RunDir
from store import Store, is_watched
from store.ingest.damage import rebuild_damaged
from store.published.copy_time import recorded_until_ns
from watch.verdicts.run_phase import RunPhase, run_phase, settled_phase

__all__ = ["STILL_READING", "diagnosed_run"]

STILL_READING = "Still reading"
MAX_READS = 3
"""Maximum number of readings if the run's phase changes in the meantime."""
EXPLAINS_END = ("rank_lost", "hang")


@contextlib.contextmanager
def diagnosed_run(run: RunDir, *, is_over: bool = False, **options: Any) -> Iterator[tuple[Store, Diagnosis]]:
    """Yield the run's store and its diagnosis. `is_over`: the caller knows that it has ended. `options`: as for
    `Store.open`.

    Raises StoreError.
    """
    with contextlib.ExitStack() as opened:
        for last in (False,) * (MAX_READS - 1) + (True,):
            phase = RunPhase(word="ended") if is_over else settled_phase(run)
            store = opened.enter_context(Store.open(run, include_newest=True, **options))
            diagnosis = _judge(run, store, phase)
            if (damage := store.damage) is not None:  # incomplete records would give an incomplete verdict
                opened.close()
                if last or not rebuild_damaged(run):
                    raise damage
                continue
            if last or is_over or run_phase(run).word == phase.word:
                break
            opened.close()
        yield store, diagnosis


def _judge(run: RunDir, store: Store, phase: RunPhase) -> Diagnosis:
    is_live = phase.word in ("running", "ending") or (phase.word == "unknown" and is_watched(run.stores()))
    now_ns = recorded_until_ns(run) if is_live else None
    manifest = run.manifest() or {"run_id": run.run_id}
    diagnosis = diagnose(store, manifest, now_ns=now_ns, stacks_dir=run.stacks)
    if phase.word != "ending" or any(_explains_end(found) for found in diagnosis.fired):
        return diagnosis
    have = "has" if len(phase.ended) == 1 else "have"
    text = (
        f"{STILL_READING}: {ranks_text(phase.ended)} {have} ended; the cause is not recorded yet. Analyze again soon."
    )
    return replace(diagnosis, verdict=text, run={**diagnosis.run, "still_reading": True})


def _explains_end(found: Finding) -> bool:
    """Return True if the finding explains how a rank ended; `vanished` does not."""
    return found.kind in EXPLAINS_END and found.cause != "vanished"
