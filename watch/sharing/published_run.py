"""Open a run that `watch` publishes to an address (`publish.address`).

    with published_run("s3://lake/rankscope/gpt-demo") as (store, diagnosis, note):
        diagnosis.verdict

Published records lag some seconds behind: a live run is judged as of its last publication.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analyzers.diagnose import Diagnosis
from store import Store
from store.published.mirror import Mirror
from watch.verdicts.diagnosed_run import diagnosed_run

__all__ = ["published_run"]


@contextlib.contextmanager
def published_run(address: str, **options: Any) -> Iterator[tuple[Store, Diagnosis, str]]:
    """Yield the store, the diagnosis, and a note on how recent the records are. `options`: as for `Store.open`.

    Raises AddressError, StoreError.
    """
    with TemporaryDirectory(prefix="rankscope-") as scratch, Mirror(address, Path(scratch)) as mirror:
        mirror.refresh()
        with diagnosed_run(mirror.run, is_over=not mirror.is_live, **options) as (store, diagnosis):
            yield store, diagnosis, mirror.note
