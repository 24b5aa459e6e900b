"""Sample a node's devices and host once a second into table `health`, and XID errors into events.

    with sampling(run.node_dir(0), [Host(run.path), Nvml()], events, xids=Xids()):
        ...

Each source has a separate thread, so that a driver that does not answer stops only its own readings. A source that
fails is reported once and then read less often. All threads are daemons, so that a blocked one does not prevent the
exit.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.format.names import NameWriter
from probes.tape.format.schema import TABLES
from probes.tape.format.writer import COMPLETE, TapeWriter
from probes.tape.rundir import NODE_RANK
from watch.health.dcgm import Dcgm
from watch.health.device import Reading, Source, Xid, XidSource

__all__ = ["PERIOD_S", "sampling"]

PERIOD_S = 1.0
FAILED_PERIOD_S = 30.0
_COLUMNS = {column.name: (i, column.type) for i, column in enumerate(TABLES["health"].columns)}


class _Sampler:
    def __init__(self, folder: Path, events: EventWriter, period_s: float) -> None:
        self.stopped = threading.Event()
        self.period_s = period_s
        self._events = events
        self._node = os.uname().nodename
        self._names = NameWriter(folder / "names.jsonl")
        self._tape = TapeWriter(folder, TABLES["health"], rank=NODE_RANK, attempt=0)

    def follow(self, source: Source) -> None:
        """Read a source until sampling stops."""
        reported = ""
        while not self.stopped.is_set():
            start = time.monotonic()
            period_s = self.period_s
            try:
                for reading in source.read():
                    self._write(reading)
                if isinstance(source, Dcgm):
                    for xid in source.take_xids():
                        self._report(xid, source.name)
            except Exception as error:  # a failed reading must not end the thread
                period_s = FAILED_PERIOD_S
                if str(error) != reported:
                    reported = str(error)
                    self._events.write(event_kinds.HEALTH_FAILED, source=source.name, reason=reported)
            self.stopped.wait(max(0.0, period_s - (time.monotonic() - start)))

    def listen(self, source: XidSource) -> None:
        """Wait for XID errors until sampling stops or no more can be received."""
        try:
            while not self.stopped.is_set():
                for xid in source.wait(self.period_s):
                    self._report(xid, "NVML")
        except Exception as error:
            self._events.write(event_kinds.HEALTH_FAILED, source="XID", reason=str(error))

    def close(self) -> None:
        self._tape.close()
        self._names.close()

    def _write(self, reading: Reading) -> None:
        if self.stopped.is_set():
            return  # the source answered after sampling had stopped
        row = self._tape.unset_row()
        row[_COLUMNS["sample_ns"][0]] = time.monotonic_ns()
        row[_COLUMNS["node"][0]] = self._names(self._node)
        row[_COLUMNS["device"][0]] = self._names(reading.device)
        for name, value in reading.values.items():
            index, kind = _COLUMNS[name]
            row[index] = float(value) if kind == "f64" else int(value)
        self._tape.append(COMPLETE, *row)

    def _report(self, xid: Xid, source: str) -> None:
        message = f"XID {xid.code}, reported by {source}"
        self._events.write(event_kinds.XID, xid=xid.code, device=xid.device, node=self._node, message=message)


@contextmanager
def sampling(
    folder: Path,
    sources: Sequence[Source],
    events: EventWriter,
    *,
    xids: XidSource | None = None,
    period_s: float = PERIOD_S,
) -> Iterator[None]:
    """Sample until the block ends. `folder`: the node's folder."""
    sampler = _Sampler(folder, events, period_s)
    threads = [
        threading.Thread(target=sampler.follow, args=(s,), name=f"health {s.name}", daemon=True) for s in sources
    ]
    if xids is not None:
        threads.append(threading.Thread(target=sampler.listen, args=(xids,), name="health XID", daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        sampler.stopped.set()
        deadline = time.monotonic() + 2.0
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        sampler.close()
