"""A copy's buffers in shared memory, which a later process of the same rank can reopen.

    slot = Slot(folder / "rank-00003" / "slot-0")
    tensors = slot.allocate(live)               # raises OSError if there is no room
    slot.invalidate(); ...copy...               # first invalidate: an unfinished copy must not look complete
    slot.seal({"step": 40, ...}, tensors)       # in the background: hash, then the note that makes it valid
    slot.vet()                                  # healthy steps followed
    note, tensors, rng = slot.open()            # in the next attempt; raises CheckpointError unless the hashes agree
    slot.receive(size, fill, note)              # a copy that another node sends

A slot is three files: the tensors' bytes, a note (written last, by a rename, with the hash of the bytes and of the
note), and a mark once it is vetted. The files survive a killed process, because the kernel owns their pages. A later
process never writes to files of an earlier one, and reads them into private memory before it compares the hash. The
reason is that the earlier process may be stopped rather than dead, and may resume in the middle of a copy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.disk_tier.manifest import CheckpointError

__all__ = ["Slot", "remove_others"]

logger = logging.getLogger("rankscope.trainer")

_ALIGNMENT = 64
_LARGEST_SHARE = 0.5
"""Maximum share of the free shared memory used by the copies of all ranks of a node. Data workers need the rest."""


class Slot:
    """The files of one copy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note_path = path.with_name(path.name + ".json")
        self.vetted_path = path.with_name(path.name + ".vetted")
        self._map: mmap.mmap | None = None
        self.locked = False
        """True if the pages are locked, so that a GPU can copy to them by DMA."""
        self._layout: list[tuple[str, str, list[int], int]] = []

    def allocate(self, live: Mapping[str, Tensor], *, share_of: int = 1) -> dict[str, Tensor]:
        """Allocate tensors with these shapes and types. Raises OSError unless `share_of` times their size fits
        into half of the free shared memory.
        """
        self.invalidate()
        layout, size = [], 0
        for name, value in live.items():
            layout.append((name, str(value.dtype).removeprefix("torch."), list(value.shape), size))
            size += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        region = self._reserve(max(size, mmap.PAGESIZE), share_of)
        self._layout = layout
        tensors = _tensors(region, layout)
        if any(value.is_cuda for value in live.values()):
            self.locked = _lock_pages(region)
        return tensors

    def _reserve(self, size: int, share_of: int) -> mmap.mmap:
        free = shutil.disk_usage(self.path.parent).free
        if size * share_of > free * _LARGEST_SHARE:
            raise OSError(f"{size * share_of / 1e6:.0f} MB of copies do not fit into {free / 1e6:.0f} MB")
        if self.locked and self._map is not None:
            self.locked = False
            _unlock_pages(self._map)  # before truncation, which replaces the pages that the driver has registered
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # otherwise a copy would end with SIGBUS if there is no space
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        return self._map

    def invalidate(self) -> None:
        """Mark the slot as not containing a copy."""
        self.note_path.unlink(missing_ok=True)
        self.vetted_path.unlink(missing_ok=True)

    def seal(self, content: Mapping[str, Any], rng: Mapping[str, Tensor]) -> None:
        """Hash the bytes and write the note. Raises OSError."""
        assert self._map is not None
        note: dict[str, Any] = {
            **content,
            "layout": self._layout,
            "rng": {name: [str(value.dtype), _to_base64(value)] for name, value in rng.items()},
            "blake2b": hashlib.blake2b(self._map, digest_size=32).hexdigest(),
        }
        self._write_note(json.dumps(note | {"digest": _digest(note)}))

    def receive(self, size: int, fill: Callable[[memoryview], None], note_text: str) -> None:
        """Receive a copy from another node: `fill` writes the bytes. `note_text` is kept only if the hash of these
        bytes matches.

        Raises CheckpointError if it does not match, and any error from `fill`. The memory is reused for the next copy.
        """
        self.invalidate()
        region = self._map if self._map is not None and len(self._map) == size else self._reserve(size, 1)
        with memoryview(region) as view:
            fill(view)
        note = _parse(note_text)
        if hashlib.blake2b(region, digest_size=32).hexdigest() != note["blake2b"]:
            raise CheckpointError(f"copy in {self.path.name}: it does not have the hash that it was sent with")
        self._write_note(note_text)

    def _write_note(self, text: str) -> None:
        fresh = self.note_path.with_suffix(".fresh")
        fresh.write_text(text)
        fence.check()
        fresh.replace(self.note_path)

    def vet(self) -> None:
        """Mark the copy as vetted: enough healthy steps have followed."""
        self.vetted_path.touch()

    @property
    def vetted(self) -> bool:
        return self.vetted_path.exists()

    @property
    def step(self) -> int:
        """Step of the copy in the slot; -1 if its note cannot be read."""
        try:
            return int(self.note()["values"]["position"]["step"])
        except (CheckpointError, ValueError, KeyError, TypeError):
            return -1

    def note(self) -> dict[str, Any]:
        """Read the note of the copy in the slot. Raises CheckpointError if there is none, or if it was altered."""
        try:
            return _parse(self.note_path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"copy in {self.path.name}: {error.strerror}") from None

    def open(self) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
        """Read the note, the tensors and the states of random generators that a former process left. Raises
        CheckpointError unless the hashes match.
        """
        note = self.note()
        try:
            content = bytearray(self.path.read_bytes())
            if hashlib.blake2b(content, digest_size=32).hexdigest() != note["blake2b"]:
                raise ValueError("it does not have the hash that it was written with")
            layout = [(name, dtype, shape, offset) for name, dtype, shape, offset in note["layout"]]
            rng = {name: _from_base64(dtype, text) for name, (dtype, text) in note["rng"].items()}
            return note, _tensors(content, layout), rng
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"copy in {self.path.name}: {error}") from None

    @staticmethod
    def all_in(folder: Path) -> list[Slot]:
        """Slots in `folder` that have a note, left by former processes."""
        return [Slot(path.with_suffix("")) for path in sorted(folder.glob("slot-*.json"))]


def remove_others(folder: Path, prefix: str, *, keep_step: int = -1) -> None:
    """Delete all slots, including unfinished ones. Keep slots with names that start with `prefix`, and the copy of
    `keep_step`.
    """
    kept = {slot.path.name for slot in Slot.all_in(folder) if slot.step == keep_step}
    for path in folder.glob("slot-*"):
        if path.name.partition(".")[0] not in kept and not path.name.startswith(prefix):
            path.unlink(missing_ok=True)


def _tensors(memory: Any, layout: list[tuple[str, str, list[int], int]]) -> dict[str, Tensor]:
    tensors = {}
    for name, dtype_name, shape, offset in layout:
        dtype, count = getattr(torch, dtype_name), math.prod(shape)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset) if count else torch.empty(0)
        tensors[name] = flat.to(dtype).view(shape)
    return tensors


def _lock_pages(region: mmap.mmap) -> bool:
    """Page-lock memory, so that a GPU can copy to it directly. Returns False if the driver refuses; copies are then
    slower.
    """
    whole = torch.frombuffer(region, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch: no types
    if int(runtime.cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)) == 0:
        return True
    logger.warning("%.0f MB of shared memory cannot be locked: copies of the state take longer", whole.nbytes / 1e6)
    return False


def _unlock_pages(region: mmap.mmap) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch: no types
    if code := int(runtime.cudaHostUnregister(torch.frombuffer(region, dtype=torch.uint8).data_ptr())):
        logger.warning("shared memory could not be unlocked: CUDA error %d", code)


def _to_base64(value: Tensor) -> str:
    return base64.b64encode(value.contiguous().view(torch.uint8).numpy().tobytes()).decode()


def _from_base64(dtype: str, text: str) -> Tensor:
    blob = bytearray(base64.b64decode(text))
    return torch.frombuffer(blob, dtype=getattr(torch, dtype.removeprefix("torch.")))


def _parse(text: str) -> dict[str, Any]:
    """Parse a note and check its hash. Raises CheckpointError."""
    try:
        note: dict[str, Any] = json.loads(text)
        if note.pop("digest") != _digest(note):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError("the metadata of a copy in memory is damaged") from None
    return note


def _digest(note: Mapping[str, Any]) -> str:
    blob = json.dumps(note, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(blob, digest_size=32).hexdigest()
