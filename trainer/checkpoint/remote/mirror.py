"""Mirror a run's finished checkpoints to a remote address, in a thread of the launcher, so that ranks lose no time.

    mirror = CheckpointMirror(run, config, events)
    mirror.restore()        # before the ranks start: fetch what this machine has lost
    mirror.start()
    problem = mirror.close()                    # after the ranks ended: "" if the newest has been sent, else the reason

The newest readable checkpoint is sent first. Checkpoints condemned or pruned locally are removed remotely. Failed
uploads are retried during the run, without affecting the training. A local checkpoint that is temporarily unreadable is
neither damaged nor deleted: until it is readable, nothing is removed remotely.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from probes.fail_open import failing_open
from probes.guard.ledger import LEDGER_NAME, copy_of
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from trainer.checkpoint.disk_tier.checkpoints import checkpoint_steps
from trainer.checkpoint.disk_tier.condemned import condemned_as_damaged
from trainer.checkpoint.disk_tier.manifest import MANIFEST_NAME, CheckpointError, StorageError
from trainer.checkpoint.remote.address import RemoteError, RemoteFolder
from trainer.checkpoint.remote.copies import RemoteCopies
from trainer.checkpoint.starting_over import start_over_is_due
from trainer.config.config import CheckpointConfig

__all__ = ["CheckpointMirror", "address_of"]

POLL_S = 1.0
MAX_WAIT_S = 60.0
"""Maximum seconds between retries of a failed upload."""
END_S = 900.0
"""Seconds that the upload of the newest checkpoint may take after the run."""
MAX_LEDGER_BYTES = 16 << 20


def address_of(config: CheckpointConfig, run: RunDir) -> str:
    """The address of this run's checkpoints."""
    return f"{config.remote.rstrip('/')}/{run.run_id}"


class CheckpointMirror:
    """Local and remote checkpoints of one run. Only one launcher sends at a time: the one named in `run.json`."""

    def __init__(
        self,
        run: RunDir,
        config: CheckpointConfig,
        events: EventWriter,
        *,
        open_folder: Callable[[str], RemoteFolder] = RemoteFolder,
    ) -> None:
        self.address = address_of(config, run)
        self._run = run
        self._config = config
        self._events = events
        self._open_folder = open_folder
        self._copies: RemoteCopies | None = None
        self._seen: set[int] = set()
        """Steps with local checkpoints that were finished while this process ran."""
        self._refused: set[tuple[int, bytes]] = set()
        """(step, manifest) of local checkpoints that were found damaged and are not sent."""
        self._ledger = b""
        self._reported = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rankscope-remote-checkpoints", daemon=True)

    # Before the ranks start.

    def restore(self) -> int | None:
        """Fetch the newest remote checkpoint if it is newer than all local ones, and return its step or None. Then
        write the run's description to the address.

        If the hashes of a remote checkpoint do not match, the previous one is fetched. If the address cannot be read or
        written, or holds only damaged checkpoints, a run without a local checkpoint must not start: raises RemoteError.
        With a local checkpoint, the failure is only recorded.
        """
        local: list[int] = []
        resume = self._config.resume
        try:
            local = checkpoint_steps(self._run.checkpoints)
            with self._opened() as copies:
                step = self._fetch_newest(copies, max(local, default=-1)) if resume else None
                if step is None and not local and resume and (num := len(copies.folder.sizes("condemned"))):
                    over = "To start over, set checkpoint.resume=false"
                    raise RemoteError(f"{self.address}: no checkpoint can be used, {num} files are condemned. {over}")
                copies.folder.write("run.json", (self._run.path / "run.json").read_bytes())
        except (OSError, StorageError) as error:
            self._report("failed", reason=_line(error))
            if not local:
                raise RemoteError(_line(error)) from None
            return None
        return step

    def _fetch_newest(self, copies: RemoteCopies, newer_than: int) -> int | None:
        damaged = condemned_as_damaged(self._run.checkpoints)
        for step in reversed([step for step in copies.steps if step > newer_than]):
            condemned = f"step-{step:08d}.condemned"
            if (self._run.checkpoints / condemned).exists() and condemned not in damaged:
                continue  # its training state was condemned, and the remote copy has the same state
            start = time.monotonic_ns()
            try:
                folder = copies.fetch(step, self._run.checkpoints)
            except CheckpointError as error:
                self._report("condemned", step=step, reason=str(error))
                continue
            size = sum(path.stat().st_size for path in folder.iterdir())
            self._fetch_ledger(copies)
            self._report("loaded", step=step, bytes=size, duration_ns=time.monotonic_ns() - start)
            return step
        return None

    def _fetch_ledger(self, copies: RemoteCopies) -> None:
        """Fetch the ledger, which lists skipped batches, unless there is a local one."""
        path = self._run.checkpoints / LEDGER_NAME
        content = None if path.exists() else copies.folder.read(LEDGER_NAME, MAX_LEDGER_BYTES)
        if content is not None:
            # write both files of the ledger, because a single one would be reported as loss of the other
            for each in (copy_of(path), path):
                each.write_bytes(content)

    # While the ranks train.

    def start(self) -> None:
        """Start sending."""
        self._thread.start()

    def _work(self) -> None:
        wait_s = POLL_S
        while not self._stop.wait(wait_s):
            with failing_open("remote checkpoints"):
                wait_s = POLL_S if self.sync() else min(max(2 * wait_s, 5.0), MAX_WAIT_S)

    def sync(self) -> bool:
        """Mirror the folder to the address. One call sends at most one checkpoint. Returns False if something is
        unreadable now.
        """
        if self._run.manifest().get("launcher_pid", os.getpid()) != os.getpid():
            return True  # a later launch has taken the run
        try:
            if start_over_is_due(self._run):
                return True  # the run starts over: its local checkpoints will be set aside, so do not mirror them
            with self._opened() as copies:
                local, unread = self._finished()
                self._seen |= local.keys()
                unread |= self._send_next(copies, local)
                self._send_ledger(copies)
                for step in self._retired(copies, local) if not unread else ():
                    copies.remove(step)
                    self._report("removed", step=step, reason="it was removed or condemned on the disk")
        except (OSError, StorageError) as error:
            if isinstance(error, RemoteError):
                self._copies = None  # clear the list, so that the next call lists the remote checkpoints again
            return self._failed(_line(error), max(self._seen, default=None))
        if unread:
            return self._failed(unread[max(unread)], max(unread))
        self._reported = ""
        return True

    def _failed(self, reason: str, step: int | None) -> bool:
        if not self._reported:
            self._reported = reason
            self._report("failed", step=step, reason=reason)
        return False

    def _send_next(self, copies: RemoteCopies, local: dict[int, bytes]) -> dict[int, str]:
        """Send the newest due checkpoint that is readable. Returns {step: reason} for those that cannot be read now."""
        unread = {}
        for step in self._due(copies, local):
            try:
                self._send(copies, step, local[step])
            except RemoteError:
                raise
            except (OSError, StorageError) as error:
                unread[step] = _line(error)
            else:
                break
        return unread

    def _due(self, copies: RemoteCopies, local: dict[int, bytes]) -> list[int]:
        """Steps of the local checkpoints to be sent, newest first."""
        due = (step for step, raw in local.items() if not copies.holds(step, raw) and (step, raw) not in self._refused)
        return sorted(due, reverse=True)

    def _send(self, copies: RemoteCopies, step: int, raw: bytes) -> None:
        folder = self._run.checkpoints / f"step-{step:08d}"
        start = time.monotonic_ns()
        try:
            num_bytes = copies.publish(folder)
        except (FileNotFoundError, CheckpointError) as error:
            if folder.is_dir():  # otherwise the checkpoint was removed in the meantime
                self._refused.add((step, raw))
                self._report("failed", step=step, reason=f"it is damaged here: {error}")
            return
        self._report("complete", step=step, bytes=num_bytes, duration_ns=time.monotonic_ns() - start)

    def _send_ledger(self, copies: RemoteCopies) -> None:
        with suppress(FileNotFoundError):
            content = (self._run.checkpoints / LEDGER_NAME).read_bytes()
            if content != self._ledger:
                copies.folder.write(LEDGER_NAME, content)
                self._ledger = content

    def _retired(self, copies: RemoteCopies, local: dict[int, bytes]) -> list[int]:
        """Remote steps to remove: the local checkpoint was condemned, or removed while this process ran, or the step is
        older than all steps that are kept."""
        try:
            names = set(os.listdir(self._run.checkpoints))
        except FileNotFoundError:
            return []  # the whole local folder is lost: only the remote copies are left
        every = self._config.keep_every
        oldest = min(local) if len(local) >= self._config.keep else -1
        damaged = condemned_as_damaged(self._run.checkpoints)  # damaged on the local disk; the remote copies are good
        found = []
        for step in copies.steps:
            name = f"step-{step:08d}"
            condemned = f"{name}.condemned"
            is_old = step < oldest and not (every and step % every == 0)
            is_gone = step in self._seen or condemned in names
            if name not in names and condemned not in damaged and (is_gone or is_old):
                found.append(step)
        return found

    def _finished(self) -> tuple[dict[int, bytes], dict[int, str]]:
        """{step: manifest} of finished local checkpoints, and {step: reason} of those that cannot be read now. Raises
        OSError."""
        found, unread = {}, {}
        for step in checkpoint_steps(self._run.checkpoints):
            try:
                found[step] = (self._run.checkpoints / f"step-{step:08d}" / MANIFEST_NAME).read_bytes()
            except FileNotFoundError:
                pass  # removed in the meantime
            except OSError as error:
                unread[step] = _line(error)
        return found, unread

    # After the ranks ended.

    def close(self, *, limit_s: float = END_S) -> str:
        """Send what is left. Returns "" if the newest checkpoint has been sent, and otherwise the reason. A signal ends
        the wait."""
        self._stop.set()
        given_up = threading.Event()

        def give_up(number: int, frame: FrameType | None) -> None:
            given_up.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, give_up)
        last = threading.Thread(target=self._send_rest, args=(given_up,), daemon=True)
        last.start()
        deadline = time.monotonic() + limit_s
        while last.is_alive() and not given_up.is_set() and time.monotonic() < deadline:
            last.join(0.1)
        given_up.set()
        return self._missing()

    def _send_rest(self, given_up: threading.Event) -> None:
        if self._thread.is_alive():
            self._thread.join()
        wait_s = POLL_S
        while not given_up.is_set() and not self.sync():
            given_up.wait(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _missing(self) -> str:
        """Name the newest local checkpoint that has not been sent."""
        try:
            local, unread = self._finished()
            newest = max([*local, *unread], default=None)
            unknown = unread.get(newest) if newest is not None else None
        except OSError as error:
            unknown = _line(error)
        if unknown:
            return f"Whether the newest checkpoint is at {self.address} is unknown: {unknown}"
        copies = self._copies
        if newest is None or (copies is not None and copies.holds(newest, local[newest])):
            return ""
        return f"The checkpoint of step {newest} is not at {self.address}. {self._reported}".rstrip()

    # Shared by the above.

    @contextmanager
    def _opened(self) -> Iterator[RemoteCopies]:
        """Open the remote checkpoints; the block must end within `checkpoint.remote_limit_s`."""
        copies = self._copies or RemoteCopies(self._open_folder(self.address))
        with copies.folder.limit(self._config.remote_limit_s, "Raise checkpoint.remote_limit_s."):
            if self._copies is None:
                copies.open()
                self._copies = copies
            yield copies

    def _report(self, state: str, **detail: object) -> None:
        step = detail.pop("step", None)
        self._events.write(
            event_kinds.CHECKPOINT,
            step=step if isinstance(step, int) else None,
            tier="remote",
            state=state,
            path=self.address,
            **detail,
        )


def _line(error: Exception) -> str:
    """One line that says what cannot be read, and why."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a checkpoint'} cannot be read now ({error.strerror or error})"
    return str(error)
