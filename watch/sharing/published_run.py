"""Open a run that `watch` publishes to an address (`publish.address`).

    with published_run("s3://lake/rankscope/gpt-demo") as (store, diagnosis, note):
        diagnosis.verdict

    with followed("s3://lake/rankscope/gpt-demo", report=print) as run:      # a folder that is kept up to date
        ...

What is published lies some seconds behind the run: a live one is judged as of its last publication.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analyzers.diagnose import Diagnosis
from probes.tape.rundir import RunDir
from store import Store, StoreError
from store.published.address import AddressError
from store.published.mirror import Mirror
from watch.background_loop import background_loop
from watch.verdicts.diagnosed_run import diagnosed_run

__all__ = ["followed", "published_run"]

REFRESH_S = 5.0


@contextlib.contextmanager
def published_run(address: str, **options: Any) -> Iterator[tuple[Store, Diagnosis, str]]:
    """The store, the diagnosis, and a note on how new the records are; `options` are those of `Store.open`.

    Raises AddressError, StoreError.
    """
    with TemporaryDirectory(prefix="rankscope-") as scratch, Mirror(address, Path(scratch)) as mirror:
        mirror.refresh()
        with diagnosed_run(mirror.run, is_over=not mirror.is_live, **options) as (store, diagnosis):
            yield store, diagnosis, mirror.note


@contextlib.contextmanager
def followed(address: str, *, report: Callable[[str], None], every_s: float = REFRESH_S) -> Iterator[RunDir]:
    """The copy of a run, kept up to date by a thread; `report` is given each change of what it cannot read.

    Raises AddressError, StoreError if the first copy cannot be made.
    """
    with TemporaryDirectory(prefix="rankscope-") as scratch, Mirror(address, Path(scratch)) as mirror:
        mirror.refresh()

        def refresh(stop: threading.Event) -> None:
            problem = ""
            while not stop.wait(every_s):
                before, problem = problem, ""
                try:
                    mirror.refresh()
                except (AddressError, StoreError) as error:  # what is there stays readable
                    problem = str(error)
                if problem != before:
                    report(f"not up to date: {problem}" if problem else f"{address}: up to date again")

        with background_loop(refresh, name="mirror"):
            yield mirror.run
