"""Prefetch batches in worker processes, for a reader that takes them one after the other.

    loader = Prefetcher(stream, data_rank=1, data_size=4, num_workers=2, ahead=2, pin=True)
    loader.batch(0); loader.batch(1)       # prepared by the workers
    loader.batch(7)                        # anything but the next: the workers start again from here
    loader.close()

The workers are torch's `DataLoader`; since a batch is a pure function of its number, they share nothing but numbers,
and a rollback or a skip is only another number. Batches prefetched in vain are dropped.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.data.batches import Batch, BatchStream
from trainer.data.token_folder import DataError

__all__ = ["Prefetcher"]

_DEATH_S = 2.0
"""Seconds that a process may take to end after its connection broke."""


@dataclass(frozen=True, slots=True)
class _RankBatches(Dataset[Batch]):
    """One data rank's batches by number; what a worker process runs."""

    stream: BatchStream
    data_rank: int
    data_size: int

    def __getitem__(self, index: int) -> Batch:
        return self.stream.batch(index, self.data_rank, self.data_size)


class Prefetcher:
    """`stream.batch` for one data rank; with `num_workers` = 0 a plain call."""

    def __init__(
        self, stream: BatchStream, data_rank: int, data_size: int, *, num_workers: int, ahead: int, pin: bool
    ) -> None:
        self._batches = _RankBatches(stream, data_rank, data_size)
        self._num_workers, self._ahead, self._pin = num_workers, ahead, pin
        self._next = -1
        self._running: Iterator[Batch] | None = None

    def batch(self, batch_index: int) -> Batch:
        """Raises RuntimeError (torch's, with the pid) if a worker has died."""
        if not self._num_workers:
            batch = self._batches[batch_index]
            return batch.pin_memory() if self._pin else batch
        if self._running is None or batch_index != self._next:
            self.close()
            self._running = self._start(batch_index)
        self._next = batch_index + 1
        try:
            return next(self._running)
        except DataError as error:
            last_line = str(error).strip().splitlines()[-1]  # the others are the traceback in the worker
            damaged = type(error)(last_line.partition(": ")[2])
        except (OSError, EOFError) as error:
            # A worker that dies while it hands a batch over breaks the connection before its death is known. Torch's
            # handler of SIGCHLD raises here and names it; later it would break into the telling of this error.
            time.sleep(_DEATH_S)
            raise RuntimeError(f"A data worker ended in the middle of a batch: {error}") from error
        # Out of the handler: the error's traceback holds the iterator, and workers end with that.
        self.close()
        raise damaged

    def close(self) -> None:
        """End the workers; `batch` would start them again."""
        # The iterator's destructor tells them to stop and waits for them.
        self._running = None

    def _start(self, first: int) -> Iterator[Batch]:
        loader = DataLoader(
            self._batches,
            batch_size=None,
            sampler=itertools.count(first),
            num_workers=self._num_workers,
            prefetch_factor=self._ahead,
            pin_memory=self._pin,
            worker_init_fn=_start_worker,
            # fork: a memory map is inherited, where pickling it for a fresh process would copy the whole corpus.
            multiprocessing_context="fork",
            # Else the workers' seed is drawn from the global generator, and dropout would depend on when they start.
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


def _start_worker(worker: int) -> None:
    """A forked worker must not act on the signals that its parent handles: the parent ends it.

    A launcher sends SIGTERM to the rank's whole process group, and the rank still needs batches to finish its step and
    save; a worker that died of it would raise in the middle of the save. torch's workers leave with their parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
