"""Read a run that `rankscope share` packed into one file.

    if is_shared(path):                 # store.open
        with shared_run(path) as (store, diagnosis, note):
            diagnosis.verdict

A run that was alive when it was packed is judged as of that time. The file is untrusted: it is unpacked within the
limits for archives, and its store is opened without access to anything else.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analyzers.diagnose import Diagnosis, diagnose
from probes.tape.files.safe_open import read_plain
from probes.tape.rundir import RunDir, RunError
from store import Store
from store.open import SHARED_MARK
from store.readers.untrusted.archives import expand
from store.readers.untrusted.external_files import SourceError

__all__ = ["diagnosed_folder", "shared_run"]

MAX_MARK_BYTES = 1 << 20


@contextlib.contextmanager
def shared_run(path: Path, **options: Any) -> Iterator[tuple[Store, Diagnosis, str]]:
    """Yield the store, the diagnosis, and a note on what the file lacks. `options`: as for `Store.open`.

    Raises RunError, StoreError.
    """
    with TemporaryDirectory(prefix="rankscope-") as scratch:
        try:
            expand(path, Path(scratch))
        except SourceError as error:
            raise RunError(f"{path} {error}") from None
        folders = [found.parent for found in Path(scratch).glob(f"*/{SHARED_MARK}")]
        if len(folders) != 1:
            raise RunError(f"{path} holds no run: it was not written by `rankscope share`")
        run = RunDir.open(folders[0])
        with diagnosed_folder(run, **options) as (store, diagnosis):
            yield store, diagnosis, _note(_facts(run))


@contextlib.contextmanager
def diagnosed_folder(run: RunDir, **options: Any) -> Iterator[tuple[Store, Diagnosis]]:
    """Yield the store and the diagnosis of an unpacked run."""
    facts = _facts(run)
    packed_ns = facts.get("packed_wall_ns")
    now_ns = packed_ns if facts.get("is_live") is True and isinstance(packed_ns, int) else None
    with Store.open(run, **options) as store:
        manifest = run.manifest() or {"run_id": run.run_id}
        yield store, diagnose(store, manifest, now_ns=now_ns, stacks_dir=run.stacks)


def _note(facts: dict[str, Any]) -> str:
    """One sentence on the limits of the file; empty if it holds the complete run after its end."""
    packed_ns, first_step = facts.get("packed_wall_ns"), facts.get("first_step")
    parts = []
    if facts.get("is_live") is True and isinstance(packed_ns, int):
        parts.append(f"the run was alive when it was shared ({datetime.fromtimestamp(packed_ns / 1e9):%Y-%m-%d %H:%M})")
    if isinstance(first_step, int):
        parts.append(f"rows begin at step {first_step}, and reports/report.html in the file covers the whole run")
    return "; ".join(parts)


def _facts(run: RunDir) -> dict[str, Any]:
    try:
        found = json.loads(read_plain(run.path / SHARED_MARK, MAX_MARK_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
