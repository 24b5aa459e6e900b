"""Prefetch batches in worker processes, for sequential reading.

    loader = Prefetcher(stream, data_rank=1, data_size=4, num_workers=2, ahead=2, pin=True)
    loader.batch(0); loader.batch(1)       # prepared by the workers
    loader.batch(7)                        # not the next batch: the workers restart from here
    loader.close()

The workers are those of torch's `DataLoader`. Since a batch is a pure function of its number, they only receive
numbers, and a rollback or skip is just another number. Unused prefetched batches are dropped.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from probes.attach.launch.parent_death import signal_at_parent_death
from trainer.data.batches import Batch, BatchStream
from trainer.data.token_folder import DataError

__all__ = ["Prefetcher"]

_DEATH_S = 2.0
"""Seconds that a process may take to exit after its connection broke."""


@dataclass(frozen=True, slots=True)
class _RankBatches(Dataset[Batch]):
    """One data rank's batches by number. Worker processes run this."""

    stream: BatchStream
    data_rank: int
    data_size: int

    def __getitem__(self, index: int) -> Batch:
        return self.stream.batch(index, self.data_rank, self.data_size)


class Prefetcher:
    """Prefetches the batches of `stream.batch` for one data rank. With `num_workers` = 0, `batch` calls it directly."""

    def __init__(
        self, stream: BatchStream, data_rank: int, data_size: int, *, num_workers: int, ahead: int, pin: bool
    ) -> None:
        self._batches = _RankBatches(stream, data_rank, data_size)
        self._num_workers, self._ahead, self._pin = num_workers, ahead, pin
        self._next = -1
        self._running: Iterator[Batch] | None = None

    def batch(self, batch_index: int) -> Batch:
        """Return a batch. Raises RuntimeError (torch's, with the pid) if a worker has died."""
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
            last_line = str(error).strip().splitlines()[-1]  # the other lines are the worker's traceback
            damaged = type(error)(last_line.partition(": ")[2])
            error.__traceback__ = None  # a frame of torch in it refers to the error: this cycle would keep the workers
        except (OSError, EOFError) as error:
            # A worker that dies while it sends a batch breaks the connection before its death is known. Wait here for
            # torch's SIGCHLD handler, which raises an error with the worker's name; if it ran later, it would interrupt
            # the handling of this error.
            time.sleep(_DEATH_S)
            raise RuntimeError(f"A data worker ended in the middle of a batch: {error}") from error
        # Outside the handler: the error's traceback references the iterator, and workers end with the iterator.
        self.close()
        raise damaged

    def close(self) -> None:
        """Stop the workers; another `batch` would restart them."""
        # The iterator's destructor stops the workers and waits for them.
        self._running = None

    def _start(self, first: int) -> Iterator[Batch]:
        loader = DataLoader(
            self._batches,
            batch_size=None,
            sampler=itertools.count(first),
            num_workers=self._num_workers,
            prefetch_factor=self._ahead,
            pin_memory=self._pin,
            worker_init_fn=partial(_start_worker, parent=os.getpid()),
            # fork, because a memory map is inherited, whereas pickling it for a new process would copy the whole
            # corpus.
            multiprocessing_context="fork",
            # Otherwise the workers' seed is drawn from the global generator, and dropout would depend on when they
            # start.
            generator=torch.Generator().manual_seed(0),
        )
        return iter(loader)


def _start_worker(worker: int, parent: int) -> None:
    """Reset the signal handlers in a forked worker, so that only its parent ends it.

    A launcher sends SIGTERM to the rank's whole process group. But the rank still needs batches to finish its step and
    save, and the death of a worker would raise an error in the middle of the save. torch's workers exit with their
    parent only between two batches, so the kernel ends one that is in the middle of a batch.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal_at_parent_death(signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call took effect
        os.kill(os.getpid(), signal.SIGKILL)
