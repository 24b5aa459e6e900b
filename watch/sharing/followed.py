"""Keep local copies of a run that was published to a folder or bucket, or of all runs there, for any reader to open.

    with followed("s3://lake/rankscope/gpt-demo", report=print) as folder:      # a copy of one run
        ...
    with followed("s3://lake/rankscope", report=print) as folder: # a folder with copies of the newest runs ...

A thread keeps the copies up to date. At a prefix, the newest run is copied first, so that it can be shown immediately.
New runs are discovered, and ended runs are checked at intervals, because they may be resumed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from store import StoreError
from store.published.address import AddressError
from store.published.listing import run_address, runs_at
from store.published.mirror import Mirror
from watch.background_loop import background_loop

__all__ = ["followed"]

REFRESH_S = 5.0
MAX_RUNS = 50
"""Maximum number of runs copied from a prefix: the newest."""
ENDED_EVERY = 12
"""Number of rounds between two checks of an ended run. It is also the number between two listings of a prefix that has
more runs than are copied."""


@contextlib.contextmanager
def followed(address: str, *, report: Callable[[str], None], every_s: float = REFRESH_S) -> Iterator[Path]:
    """Yield the copy of a run, or a folder of copies. `report` is called when problems with reading begin, change or
    end.

    Raises AddressError or StoreError if the first copy cannot be made.
    """
    with (
        TemporaryDirectory(prefix="rankscope-") as scratch,
        contextlib.closing(_Copies(address, Path(scratch))) as copies,
    ):
        copies.begin()

        def refresh(stop: threading.Event) -> None:
            problem, wait_s = "", 0.0 if copies.has_more else every_s
            while not stop.wait(wait_s):
                before, problem, wait_s = problem, copies.refresh(stop), every_s
                if problem != before:
                    report(f"not up to date: {problem}" if problem else f"{address}: up to date again")

        with background_loop(refresh, name="mirror"):
            yield copies.folder


class _Copies:
    """Copies of the runs at an address."""

    def __init__(self, address: str, scratch: Path) -> None:
        self._address, self._scratch = address, scratch
        self._names: list[str] = []
        self._is_prefix = False
        self._mirrors: dict[str, Mirror] = {}
        self._problems: dict[str, str] = {}  # why a run's last copy failed
        self._round = 0

    @property
    def folder(self) -> Path:
        """The copy of the single run, or the folder of all copies."""
        return self._scratch if self._is_prefix else self._mirrors[""].run.path

    @property
    def has_more(self) -> bool:
        """True while runs wait for their first copy."""
        return len(self._mirrors.keys() | self._problems.keys()) < min(len(self._names), MAX_RUNS)

    def begin(self) -> None:
        """Copy the run, or the newest readable one. Raises AddressError, StoreError."""
        self._names = runs_at(self._address)
        self._is_prefix = bool(self._names)
        first: Exception | None = None
        for name in self._names[:MAX_RUNS] or [""]:
            try:
                self._copy(name)
                return
            except (AddressError, StoreError) as error:
                first = first or error
        assert first is not None
        raise first

    def refresh(self, stop: threading.Event) -> str:
        """Copy what is new. Returns what could not be read, or an empty text."""
        self._round += 1
        is_long = len(self._names) > MAX_RUNS  # then list rarely: listing takes a request per run, and most are old
        try:
            if self._is_prefix and not (is_long and self._round % ENDED_EVERY):
                self._names = runs_at(self._address)
        except AddressError as error:
            return str(error)
        names = self._names[:MAX_RUNS] if self._is_prefix else [""]
        for name in names:
            known = self._mirrors.get(name)
            is_refused = known is None and name in self._problems
            is_rare = is_refused or (self._is_prefix and known is not None and not known.is_live)
            if stop.is_set() or (is_rare and self._round % ENDED_EVERY):
                continue
            # If a run cannot be copied, its existing copy stays readable, and the other runs are still copied.
            with contextlib.suppress(AddressError, StoreError):
                self._copy(name)
        problems = [self._problems[name] for name in names if name in self._problems]
        more = f"; and {len(problems) - 1} more runs" if len(problems) > 1 else ""
        return f"{problems[0]}{more}" if problems else ""

    def close(self) -> None:
        """Release the locks that mark copies as live."""
        for mirror in self._mirrors.values():
            mirror.close()

    def _copy(self, name: str) -> None:
        """Copy a run, or its new records. Raises AddressError, StoreError."""
        try:
            mirror = self._mirrors.get(name)
            if mirror is None:
                mirror = Mirror(run_address(self._address, name) if name else self._address, self._scratch)
            mirror.refresh()
        except (AddressError, StoreError) as error:
            self._problems[name] = str(error)
            raise
        self._mirrors[name] = mirror
        self._problems.pop(name, None)
