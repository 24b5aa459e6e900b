"""The ledger of a run on disk: loaded by rank 0 for all ranks, written immediately or in the background.

    file = LedgerFile(run.checkpoints, recorder, is_chief=rank == 0)
    file.ledger.skip(40, "..."); file.save()        # on the disk when it returns
    file.save_later(executor)                       # for entries that can be recovered after a kill
    file.report_problem()                           # in the training thread: record errors of the background

A full disk must not end the training: the ledger is kept in memory, and in the next checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.guard.ledger import LEDGER_NAME, Ledger, copy_of
from probes.tape import event_kinds
from trainer.checkpoint.disk_tier.manifest import StorageError, write_json

if TYPE_CHECKING:
    from probes.recorder import Recorder

__all__ = ["LedgerFile", "save_ledger"]


def save_ledger(ledger: Ledger) -> None:
    """Write and sync a ledger that has a path. Raises Fenced in a process of an older attempt."""
    if ledger.path is not None:
        ledger.sequence += 1
        _write_both(ledger.path, ledger.to_file())


def _write_both(path: Path, content: Mapping[str, Any]) -> None:
    """Write both copies one after the other, so that at any time one is complete."""
    write_json(path, content)
    write_json(copy_of(path), content)


class LedgerFile:
    """All ranks have the same `ledger`; rank 0 writes it."""

    def __init__(self, folder: Path, recorder: Recorder, *, is_chief: bool) -> None:
        self._path = folder / LEDGER_NAME
        self._recorder = recorder
        self._is_chief = is_chief
        self._lock = threading.Lock()
        self._newest = 0
        self._written = 0
        self._problem = ""
        folder.mkdir(exist_ok=True)
        found: dict[str, Any] | str = ""
        if is_chief:
            try:
                ledger, self._problem = Ledger.load(self._path)
                self.report_problem()
                found = ledger.to_json()
            except OSError as error:
                found = f"{self._path.name} cannot be read now ({error.strerror})"
        from trainer.checkpoint.agreement import from_rank_0  # imported late: a launcher saves without torch

        found = from_rank_0(found)
        if isinstance(found, str):
            raise StorageError(found)
        self.ledger = Ledger.from_json(found)
        self.ledger.path = self._path if is_chief else None
        if is_chief and not self.ledger.sequence:
            self.save()  # written before any checkpoint: if the ledger is missing later, it was lost

    def save(self) -> None:
        """Write and sync it. Raises Fenced in a process of an older attempt."""
        if self._is_chief:
            self._write(*self._numbered())
            self.report_problem()

    def save_later(self, executor: Executor) -> None:
        """Write and sync its current content in the background."""
        if self._is_chief:
            executor.submit(self._write, *self._numbered())

    def report_problem(self) -> None:
        """Record an event if saving has failed since the last call."""
        problem, self._problem = self._problem, ""
        if problem:
            self._recorder.event(event_kinds.CHECKPOINT, tier="disk", state="failed", path=LEDGER_NAME, reason=problem)

    def _numbered(self) -> tuple[dict[str, Any], int]:
        self._newest += 1
        self.ledger.sequence += 1
        return self.ledger.to_file(), self._newest

    def _write(self, content: dict[str, Any], number: int) -> None:
        """Write the ledger unless a newer one has been written."""
        with self._lock:
            if number < self._written:
                return
            try:
                _write_both(self._path, content)
                self._written = number
            except OSError as error:
                self._problem = f"{LEDGER_NAME} cannot be written: {error.strerror}"
