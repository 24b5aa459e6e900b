"""Worker processes that write shards: each requests the next shard when it is done, and exits with its parent.

    write_shards(writer_setup, plan.shards, num_processes=2, on_progress=..., on_shard=...)

With `num_processes=1` the calling process writes the shards. Shards do not depend on which process writes them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from probes.attach.launch.parent_death import signal_at_parent_death
from probes.tape.signal_names import signal_name
from trainer.data.prepare.plan import PlannedShard, PreparePlan
from trainer.data.prepare.tokenizer import BYTES, load_tokenizer
from trainer.data.prepare.write_shard import Advance, ShardWriter
from trainer.data.token_folder import DataError, Shard

__all__ = ["WorkerSetup", "write_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Arguments of a process that writes shards of the plan."""

    folder: Path
    plan: PreparePlan
    tokenizer: str

    def writer(self) -> ShardWriter:
        # Each process may use one core. By default, the tokenizers library would use all cores in each process.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return ShardWriter(self.folder, self.plan, load_tokenizer(self.tokenizer, self._end_token()))

    def _end_token(self) -> str:
        return self.plan.tokenizer.end_token if self.plan.tokenizer.name != BYTES else ""


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    shard: PlannedShard | None = None


def write_shards(
    setup: WorkerSetup,
    shards: Sequence[PlannedShard],
    *,
    num_processes: int,
    on_progress: Callable[[Advance], None],
    on_shard: Callable[[Shard], None],
) -> None:
    """Write all `shards`. Raises the first DataError of any process, and OSError if the disk is full."""
    num_processes = min(num_processes, len(shards))
    if num_processes <= 1:
        writer = setup.writer()
        for shard in shards:
            on_shard(writer.write(shard, on_progress))
        return
    waiting = list(reversed(shards))
    workers = [_start(setup) for _ in range(num_processes)]
    try:
        for worker in workers:
            _give_next(worker, waiting)
        while busy := [worker for worker in workers if worker.shard is not None]:
            by_connection = {worker.connection: worker for worker in busy}
            for ready in wait(list(by_connection)):
                worker = by_connection[ready]  # type: ignore[index]  # wait returns what it was given
                message = _receive(worker, setup.plan)
                if isinstance(message, Advance):
                    on_progress(message)
                elif isinstance(message, Shard):
                    on_shard(message)
                    _give_next(worker, waiting)
                else:
                    raise message
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()


def _start(setup: WorkerSetup) -> _Worker:
    context = multiprocessing.get_context("spawn")  # threads of fsspec and pyarrow do not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, setup, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give_next(worker: _Worker, waiting: list[PlannedShard]) -> None:
    worker.shard = waiting.pop() if waiting else None
    if worker.shard is not None:
        try:
            worker.connection.send(worker.shard)
        except OSError:
            pass  # the process has exited, which the next receive reports


def _receive(worker: _Worker, plan: PreparePlan) -> Advance | Shard | Exception:
    try:
        message: Advance | Shard | Exception = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"signal {-code} ({signal_name(code)})" if code < 0 else f"exit code {code}"
        assert worker.shard is not None
        names = [plan.sources[piece.source].name for piece in worker.shard.pieces]
        raise DataError(
            f"{names[0]}{f' to {names[-1]}' if names[-1] != names[0] else ''}: the process that encoded this ended by "
            f"{how}; if memory ran out use fewer --processes, then run the same command: it continues"
        ) from None
    return message


def _serve(connection: Connection, setup: WorkerSetup, parent: int) -> None:
    """Main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal_at_parent_death(signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call took effect
        return
    try:
        writer = setup.writer()
        while True:
            shard: PlannedShard = connection.recv()
            connection.send(writer.write(shard, connection.send))
    except (EOFError, BrokenPipeError):
        return
    except (DataError, OSError) as error:
        connection.send(error)
