"""Checkpoints at a remote address: files named by their hashes, and a manifest per checkpoint, written last.

    copies = RemoteCopies(RemoteFolder("s3://bucket/runs/gpt-20261122"))
    copies.open()
    sent = copies.publish(run.checkpoints / "step-00000050")     # bytes sent; existing files are not sent again
    copies.fetch(50, run.checkpoints)                            # verified, under its name; CheckpointError if damaged
    copies.remove(40)

| name | content |
|---|---|
| `checkpoints/step-00000050.json` | the checkpoint's `manifest.json`; without it there is no checkpoint |
| `objects/<blake2b>` | a file of one or several checkpoints, named by the hash in their manifests |
| `condemned/step-00000050.json`, `condemned/<blake2b>` | a checkpoint or file that did not match its hash |
| `run.json`, `ledger.json` | what a launch on another machine needs in addition |

Only one process may write; any number may read.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from trainer.checkpoint.disk_tier.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    CheckpointError,
    FileDigest,
    read_manifest,
    verify_files,
)
from trainer.checkpoint.remote.address import RemoteFolder
from trainer.fsync import fsync_path

__all__ = ["RemoteCopies"]

_MANIFEST = re.compile(r"checkpoints/step-(\d{8,18})\.json")
_HASH = re.compile(r"[0-9a-f]{64}")
TRANSFERS = 4
"""Number of files transferred at the same time; s3fs also sends the parts of each file concurrently."""


class RemoteCopies:
    """The checkpoints of one run at an address. Methods raise RemoteError."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder
        self._manifests: dict[int, bytes] = {}
        self._objects: dict[str, int] = {}

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints at the address, oldest first."""
        return sorted(self._manifests)

    def open(self) -> None:
        """Read the list of checkpoints."""
        names = self.folder.sizes("checkpoints")
        self._objects = {name.rpartition("/")[2]: size for name, size in self.folder.sizes("objects").items()}
        self._manifests = {}
        for name in names:
            content = self.folder.read(name, MAX_MANIFEST_BYTES) if (match := _MANIFEST.fullmatch(name)) else None
            if match and content is not None:
                self._manifests[int(match[1])] = content

    def holds(self, step: int, manifest: bytes) -> bool:
        """Return True if the address has this same checkpoint of the step."""
        return self._manifests.get(step) == manifest

    def publish(self, local: Path) -> int:
        """Upload a finished checkpoint; returns the bytes sent. Raises CheckpointError if the local files are
        damaged.
        """
        raw = (local / MANIFEST_NAME).read_bytes()
        manifest = read_manifest(local)
        files: dict[str, FileDigest] = manifest["files"]
        due = {name: digest for name, digest in files.items() if self._objects.get(digest.blake2b) != digest.bytes}

        def send(name: str) -> None:
            verify_files(local, manifest, [name])  # an object's content must match its name
            self.folder.put(local / name, f"objects/{files[name].blake2b}")
            self._objects[files[name].blake2b] = files[name].bytes  # a retry after another file's error skips this one

        _run_concurrently(send, due)
        step = int(manifest["step"])
        self.folder.write(_name(step), raw)
        self._manifests[step] = raw
        return sum(digest.bytes for digest in due.values()) + len(raw)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, and the files that no other checkpoint has."""
        self.folder.remove([_name(step)])
        self._manifests.pop(step, None)
        try:
            used = {digest for raw in self._manifests.values() for digest in _hashes(raw)}
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # a manifest is malformed, so any of the objects may belong to it
        unused = sorted(self._objects.keys() - used)
        self.folder.remove(f"objects/{digest}" for digest in unused)
        for digest in unused:
            del self._objects[digest]

    def fetch(self, step: int, into: Path, *, condemn: bool = True) -> Path:
        """Download a checkpoint into a new subfolder of `into`, and verify its hashes. Returns the subfolder.

        Raises CheckpointError if the remote checkpoint is damaged, as proven by fetching it twice; with `condemn` it is
        then moved aside.
        """
        final = into / f"step-{step:08d}"
        scratch = into / f"{final.name}.remote.tmp"  # the next attempt removes it
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        (scratch / MANIFEST_NAME).write_bytes(self._manifests[step])
        damaged: list[str] = []
        try:
            manifest = read_manifest(scratch)
            files: dict[str, FileDigest] = manifest["files"]

            def fetch(name: str) -> None:
                try:
                    self._fetch_file(scratch, manifest, name, files[name])
                except CheckpointError:
                    damaged.append(files[name].blake2b)
                    raise

            _run_concurrently(fetch, files)
            fsync_path(scratch)
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)
            fsync_path(into)
        except CheckpointError as error:
            if condemn:
                self._condemn(step, damaged)
            text = str(error).replace(scratch.name, final.name)
            raise CheckpointError(f"{self.folder.address}: {text}") from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return final

    def _fetch_file(self, scratch: Path, manifest: dict[str, Any], name: str, digest: FileDigest) -> None:
        if not _HASH.fullmatch(digest.blake2b):
            raise CheckpointError(f"{scratch.name}: the manifest has no hash for {name}")
        object_name = f"objects/{digest.blake2b}"
        if self._objects.get(digest.blake2b) != digest.bytes:
            raise CheckpointError(f"{scratch.name}: {name} is missing or does not have {digest.bytes} bytes")
        for is_last in (False, True):
            self.folder.fetch(object_name, scratch / name, digest.bytes)
            try:
                verify_files(scratch, manifest, [name])
            except CheckpointError:
                if is_last:
                    raise
            else:
                fsync_path(scratch / name)
                return

    def _condemn(self, step: int, damaged: Iterable[str]) -> None:
        """Move a damaged checkpoint aside, together with the files that do not match their names. The files can then be
        uploaded again.
        """
        raw = self._manifests.pop(step)
        self.folder.write(f"condemned/step-{step:08d}.json", raw)
        self.folder.remove([_name(step)])
        for digest in damaged:
            if digest in self._objects:
                self.folder.move(f"objects/{digest}", f"condemned/{digest}")
                del self._objects[digest]


def _run_concurrently(action: Callable[[str], None], names: Iterable[str]) -> None:
    """Call `action` for every name, in up to `TRANSFERS` threads. Raises the first error.

    The threads are daemons, because an exiting interpreter waits for the threads of a pool, and slow storage may take
    hours.
    """
    due = queue.SimpleQueue[str]()
    for name in sorted(names):
        due.put(name)
    errors: list[BaseException] = []

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while not errors:
                name = due.get_nowait()
                try:
                    action(name)
                except BaseException as error:
                    errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(TRANSFERS, due.qsize()))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _name(step: int) -> str:
    return f"checkpoints/step-{step:08d}.json"


def _hashes(raw: bytes) -> set[str]:
    """Hashes of the files that a manifest names."""
    return {str(digest["blake2b"]) for digest in json.loads(raw)["files"].values()}
