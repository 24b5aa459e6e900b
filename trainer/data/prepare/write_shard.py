"""Write one shard: read its pieces, encode them, write tokens, document ends and block hashes, then a record.

    writer = ShardWriter(folder, plan, tokenizer)
    shard = writer.write(plan.shards[3], on_progress)
    finished_shard(folder, plan.shards[3], dtype)       # the same Shard, or None if it has to be written

Each file is written under a temporary name, synced and renamed; the record `shard-000003.json` is written last. After a
kill at any time, a shard exists completely or is written again from its sources: no document is lost or duplicated.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.prepare.documents import DocumentReader
from trainer.data.prepare.plan import PlannedShard, PreparePlan
from trainer.data.prepare.sources import current_version
from trainer.data.prepare.tokenizer import Tokenizer
from trainer.data.token_folder import BLOCK_BYTES, DataError, Shard, block_hash, shard_files
from trainer.fsync import fsync_path

__all__ = ["Advance", "ShardWriter", "finished_shard", "record_file", "remove_scratch", "write_file"]

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Text and tokens encoded since the last report."""

    text_bytes: int
    num_documents: int
    num_tokens: int


def record_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06}.json"


def finished_shard(folder: Path, planned: PlannedShard, dtype: str) -> Shard | None:
    """Return the shard if its record and all its files exist, otherwise None."""
    try:
        shard = Shard.from_json(json.loads(record_file(folder, planned.number).read_bytes()))
        sizes = [path.stat().st_size for path in shard_files(folder, planned.number)]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    num_bytes = shard.num_tokens * np.dtype(dtype).itemsize
    expected = [num_bytes, 8 * shard.num_documents, 8 * -(-num_bytes // BLOCK_BYTES)]
    return shard if sizes == expected and shard.pieces == planned.pieces else None


class ShardWriter:
    """Writes shards of one plan, one after another."""

    def __init__(self, folder: Path, plan: PreparePlan, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.plan = plan
        self.tokenizer = tokenizer

    def write(self, planned: PlannedShard, on_progress: Callable[[Advance], None]) -> Shard:
        """Write a shard. Raises DataError for a source that cannot be read or has changed, and OSError if the disk is
        full.
        """
        facts, number = self.tokenizer.facts, planned.number
        dtype = np.dtype(facts.dtype).newbyteorder("<")
        tokens_file, documents_file, blocks_file = shard_files(self.folder, number)
        reader = DocumentReader(self.plan.options)
        ends: list[np.ndarray[Any, Any]] = [np.empty(0, dtype=np.int64)]
        firsts: list[int] = []
        size = num_documents = largest = num_unknown = 0
        digest, blocks = hashlib.sha256(), _BlockHashes()
        scratch = _scratch(tokens_file)
        try:
            with scratch.open("wb") as out:
                for piece in planned.pieces:
                    firsts.append(num_documents)
                    self._check_source(piece.source)
                    for texts in _batches(reader.read(self.plan.sources[piece.source], piece)):
                        tokens, lengths = self.tokenizer.encode(texts)
                        ends.append(size + np.cumsum(lengths))
                        size += len(tokens)
                        num_documents += len(lengths)
                        largest = max(largest, int(tokens.max()))
                        num_unknown += int((tokens == facts.unknown_id).sum()) if facts.unknown_id is not None else 0
                        content = tokens.astype(dtype, copy=False).tobytes()
                        digest.update(content)
                        blocks.update(content)
                        out.write(content)
                        text_bytes = sum(len(text) for text in texts)  # characters: accurate enough for a progress bar
                        on_progress(Advance(text_bytes=text_bytes, num_documents=len(texts), num_tokens=len(tokens)))
                    self._check_source(piece.source)
                out.flush()
                os.fsync(out.fileno())
            os.replace(scratch, tokens_file)
        finally:
            scratch.unlink(missing_ok=True)
        documents, hashes = np.concatenate(ends).astype("<u8").tobytes(), blocks.finish()
        write_file(documents_file, documents)
        write_file(blocks_file, hashes)
        shard = Shard(
            number=number,
            num_tokens=size,
            num_documents=num_documents,
            num_empty=reader.num_empty,
            num_skipped=reader.num_skipped,
            num_unknown=num_unknown,
            largest_token=largest,
            tokens_sha256=digest.hexdigest(),
            documents_sha256=hashlib.sha256(documents).hexdigest(),
            blocks_sha256=hashlib.sha256(hashes).hexdigest(),
            pieces=planned.pieces,
            first_documents=tuple(firsts),
        )
        fsync_path(self.folder)
        write_file(record_file(self.folder, number), json.dumps(asdict(shard)).encode())
        return shard

    def _check_source(self, number: int) -> None:
        source = self.plan.sources[number]
        if current_version(source.name) != (source.size_bytes, source.version):
            raise DataError(
                f"{source.name}: has changed since this preparation began; delete {self.folder} and prepare again"
            )


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _BlockHashes:
    """Hashes of a file's blocks, computed while the file is written in pieces of any size."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._hashes: list[bytes] = []

    def update(self, content: bytes) -> None:
        self._rest += content
        whole = len(self._rest) // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            with memoryview(self._rest) as view:
                self._hashes += [block_hash(view[at : at + BLOCK_BYTES]) for at in range(0, whole, BLOCK_BYTES)]
            del self._rest[:whole]

    def finish(self) -> bytes:
        if self._rest:
            self._hashes.append(block_hash(bytes(self._rest)))
        return b"".join(self._hashes)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically. It survives a power cut once the folder is synced."""
    scratch = _scratch(path)
    try:
        with scratch.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_scratch(folder: Path) -> None:
    """Remove temporary files of a killed preparation."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
