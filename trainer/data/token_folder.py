"""Format of a prepared folder: what `rankscope prepare` writes and the trainer reads.

    manifest = read_manifest(Path("prepared/web"))        # raises DataError
    manifest.shards[0].num_tokens, manifest.tokenizer["end_id"]

| file | content |
|---|---|
| `manifest.json` | tokenizer, sources, shards with counts and hashes; written last, to complete the folder |
| `tokenizer.json` | copy of the tokenizer (none for "bytes") |
| `tokens-000000.bin` | tokens of a shard, little-endian; documents concatenated, each with its end token |
| `documents-000000.bin` | one uint64 per document: its end in the shard, in tokens |
| `blocks-000000.bin` | 8 bytes of BLAKE2b for each block of 16 KiB of the tokens |
| `plan.json` | sources with size and version, from which a later `rankscope prepare` continues |

The manifest has the hash of each `blocks` file, and a `blocks` file has the hashes of the token blocks. So a reader can
verify the blocks that it reads against the manifest, without reading the rest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config.load import ConfigError

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_HASH_BYTES",
    "DTYPES",
    "MANIFEST",
    "PLAN",
    "DamagedDataError",
    "DataError",
    "Manifest",
    "Shard",
    "SourceFile",
    "SourcePart",
    "block_hash",
    "digest_of",
    "is_prepared",
    "read_manifest",
    "shard_files",
]

MANIFEST = "manifest.json"
PLAN = "plan.json"
FORMAT = "rankscope-tokens"
VERSION = 1
BLOCK_BYTES = 1 << 14
BLOCK_HASH_BYTES = 8
DTYPES = ("uint8", "uint16", "uint32")


class DataError(ConfigError):
    """Data are missing, damaged, changed or unreadable. The message is one line: the file, the problem, what to do."""


class DamagedDataError(DataError):
    """Tokens read by one rank do not match the manifest; other ranks may not have noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file from which documents were read."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """A part of a source: a byte range of lines, row groups of Parquet, or the whole file."""

    source: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One token file. `first_documents[i]` is the index in the shard of the first document of `pieces[i]`."""

    number: int
    num_tokens: int
    num_documents: int
    num_empty: int
    num_skipped: int
    num_unknown: int
    largest_token: int
    tokens_sha256: str
    documents_sha256: str
    blocks_sha256: str
    pieces: tuple[SourcePart, ...]
    first_documents: tuple[int, ...]

    @staticmethod
    def from_json(values: dict[str, Any]) -> Shard:
        pieces = tuple(SourcePart(**piece) for piece in values["pieces"])
        firsts = tuple(int(number) for number in values["first_documents"])
        return Shard(**{**values, "pieces": pieces, "first_documents": firsts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a prepared folder, independent of the number of processes that wrote it."""

    dtype: str
    tokenizer: dict[str, Any]
    options: dict[str, Any]
    sources: tuple[SourceFile, ...]
    shards: tuple[Shard, ...]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def largest_token(self) -> int:
        return max((shard.largest_token for shard in self.shards), default=0)

    def to_json(self) -> dict[str, Any]:
        totals = {name: getattr(self, name) for name in ("num_tokens", "num_documents", "largest_token")}
        return {"format": FORMAT, "version": VERSION, **totals, **asdict(self)}


def is_prepared(folder: Path) -> bool:
    """Return True for a folder that `rankscope prepare` has written or begun."""
    return (folder / MANIFEST).is_file() or (folder / PLAN).is_file()


def shard_files(folder: Path, number: int) -> tuple[Path, Path, Path]:
    """Names of a shard's files: tokens, documents, blocks."""
    tokens, documents, blocks = (folder / f"{name}-{number:06}.bin" for name in ("tokens", "documents", "blocks"))
    return tokens, documents, blocks


def block_hash(block: bytes | memoryview) -> bytes:
    return hashlib.blake2b(block, digest_size=BLOCK_HASH_BYTES).digest()


def read_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`. Shard files are checked when they are read. Raises DataError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{path}: is missing, so the preparation is incomplete: run the same `rankscope prepare` again")
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != FORMAT or values["version"] != VERSION:
            raise DataError(f"{path}: is version {values['version']} of {values['format']}; prepare the data again")
        manifest = Manifest(
            dtype=values["dtype"],
            tokenizer=dict(values["tokenizer"]),
            options=dict(values["options"]),
            sources=tuple(SourceFile(**source) for source in values["sources"]),
            shards=tuple(Shard.from_json(shard) for shard in values["shards"]),
        )
        int(manifest.tokenizer["end_id"]), int(manifest.tokenizer["vocab_size"])
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: is damaged: prepare the data again, or copy the folder again") from None
    if manifest.dtype not in DTYPES:
        raise DataError(f"{path}: dtype {manifest.dtype!r} must be one of {', '.join(DTYPES)}")
    return manifest


def digest_of(manifest: Manifest) -> str:
    """Identity of the tokens, 32 hexadecimal digits: the same for equal tokens, regardless of the sources' names."""
    parts = [manifest.dtype, [[shard.num_tokens, shard.blocks_sha256] for shard in manifest.shards]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
