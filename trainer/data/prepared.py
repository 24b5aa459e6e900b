"""Read the tokens of a folder written by `rankscope prepare`, and verify them block by block.

    corpus = PreparedCorpus(Path("prepared/web"))
    corpus.read(1_000_000, 257)          # numpy array; DataError names a damaged, missing or changed file
    corpus.locate(1_000_000)             # ("web.jsonl, document 311", 17): source, document, and token in it

A rank opens only the shards that it reads from, a bounded number at a time, and reads only the 16 KiB blocks with its
sequences. Each read verifies the block against the manifest loaded at the start, so data that were changed since cannot
be trained on. Files are read instead of mapped, because truncating a mapped file kills the process.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.token_folder import (
    BLOCK_BYTES,
    BLOCK_HASH_BYTES,
    DamagedDataError,
    DataError,
    block_hash,
    digest_of,
    read_manifest,
    shard_files,
)

__all__ = ["PreparedCorpus"]

_OPEN_SHARDS = 128
_REMEDY = "copy the folder again, or prepare it again"


class _OpenShard:
    """Descriptor of a token file, and the verified hashes of its blocks."""

    def __init__(self, tokens_file: Path, blocks_file: Path, blocks_sha256: str) -> None:
        self.path = tokens_file
        self.descriptor = -1
        self.hashes = _read(blocks_file)
        if hashlib.sha256(self.hashes).hexdigest() != blocks_sha256:
            raise DamagedDataError(f"{blocks_file}: is not what the manifest says (changed or damaged): {_REMEDY}")
        try:
            self.descriptor = os.open(tokens_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(tokens_file, error) from None

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def read(self, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` of the file, from verified blocks."""
        first, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        start = first * BLOCK_BYTES
        try:
            found = os.pread(self.descriptor, (last - first) * BLOCK_BYTES, start)
        except OSError as error:
            raise _unreadable(self.path, error) from None
        view = memoryview(found)
        for number in range(first, last):
            block = view[number * BLOCK_BYTES - start : (number + 1) * BLOCK_BYTES - start]
            if block_hash(block) != self.hashes[number * BLOCK_HASH_BYTES : (number + 1) * BLOCK_HASH_BYTES]:
                raise DamagedDataError(
                    f"{self.path}: bytes {number * BLOCK_BYTES} to {(number + 1) * BLOCK_BYTES} differ from what was "
                    f"prepared (changed or damaged): {_REMEDY}"
                )
        return found[begin - start : end - start]


class PreparedCorpus:
    """The shards of a folder as one sequence of tokens. Safe to use in forked processes and in threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.digest = digest_of(self.manifest)
        self._shards = [shard for shard in self.manifest.shards if shard.num_tokens]
        self._ends = np.cumsum([shard.num_tokens for shard in self._shards])
        self._dtype: np.dtype[Any] = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)
        for shard in self._shards:
            path = shard_files(folder, shard.number)[0]
            expected = shard.num_tokens * self._dtype.itemsize
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(str(_unreadable(path, error))) from None
            if size != expected:
                raise DataError(f"{path}: has {size} bytes, the manifest says {expected}: {_REMEDY}")

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Return `count` tokens from position `start`, across shards. Raises DataError."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        size = self._dtype.itemsize
        while count > 0:
            first = start - (int(self._ends[number - 1]) if number else 0)
            taken = min(count, self._shards[number].num_tokens - first)
            parts.append(self._open(number).read(first * size, (first + taken) * size))
            start, count, number = start + taken, count - taken, number + 1
        return np.frombuffer(b"".join(parts), dtype=self._dtype)

    def locate(self, position: int) -> tuple[str, int]:
        """Source and document of a token, and its position in the document. Raises DataError."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        shard = self._shards[number]
        within = position - (int(self._ends[number - 1]) if number else 0)
        path = shard_files(self.folder, shard.number)[1]
        content = _read(path)
        if hashlib.sha256(content).hexdigest() != shard.documents_sha256:
            raise DataError(f"{path}: is not what the manifest says (changed or damaged): {_REMEDY}")
        ends = np.frombuffer(content, dtype="<u8")
        document = int(np.searchsorted(ends, within, side="right"))
        piece = int(np.searchsorted(shard.first_documents, document, side="right")) - 1
        source = shard.pieces[piece].source
        before = self._documents_before(source, number) - shard.first_documents[self._first_piece(number, source)]
        place = within - (int(ends[document - 1]) if document else 0)
        return f"{self.manifest.sources[source].name}, document {before + document}", place

    def _first_piece(self, number: int, source: int) -> int:
        return [piece.source for piece in self._shards[number].pieces].index(source)

    def _documents_before(self, source: int, number: int) -> int:
        """Number of documents of a source in the shards before `number`."""
        total = 0
        for shard in self._shards[:number]:
            bounds = (*shard.first_documents, shard.num_documents)
            total += sum(bounds[i + 1] - bounds[i] for i, piece in enumerate(shard.pieces) if piece.source == source)
        return total

    def _open_shard(self, number: int) -> _OpenShard:
        shard = self._shards[number]
        tokens_file, _, blocks_file = shard_files(self.folder, shard.number)
        return _OpenShard(tokens_file, blocks_file, shard.blocks_sha256)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> DamagedDataError:
    if isinstance(error, FileNotFoundError):
        return DamagedDataError(f"{path}: is missing: {_REMEDY}")
    return DamagedDataError(f"{path}: cannot be read ({error.strerror}): {_REMEDY}")
