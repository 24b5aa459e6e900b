"""Plan of a preparation: the pieces of sources that make up each shard, independent of the number of processes.

    plan = make_plan(sources, tokenizer.facts, options, shard_bytes=64 << 20)
    plan.shards[3].pieces

A shard is the unit of work, resuming and output: one process writes it from beginning to end. Line-based files are cut
at multiples of `shard_bytes`, Parquet files between row groups; other files are not cut. Small pieces share a shard.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from trainer.data.prepare.documents import ReadOptions, is_split_by_lines
from trainer.data.prepare.sources import Source, open_source
from trainer.data.prepare.tokenizer import TokenizerFacts
from trainer.data.token_folder import DataError, SourcePart
from trainer.error_text import first_line

__all__ = ["PlannedShard", "PreparePlan", "difference", "make_plan"]

_COMPRESSION_FACTOR = 3
"""Estimated bytes of text per byte of a compressed file, used only to distribute work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    number: int
    pieces: tuple[SourcePart, ...]
    text_bytes: int  # estimated if sources are compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparePlan:
    """Everything that the output depends on."""

    sources: tuple[Source, ...]
    tokenizer: TokenizerFacts
    options: ReadOptions
    shard_bytes: int
    shards: tuple[PlannedShard, ...]

    def to_json(self) -> dict[str, Any]:
        """Contents of `plan.json`, which identify the preparation and determine the shards."""
        return {
            "tokenizer": asdict(self.tokenizer),
            "options": {**asdict(self.options), "shard_bytes": self.shard_bytes},
            "sources": [asdict(source) for source in self.sources],
        }


def make_plan(
    sources: list[Source], tokenizer: TokenizerFacts, options: ReadOptions, *, shard_bytes: int
) -> PreparePlan:
    """Distribute all sources over shards. Reads the footers of Parquet files. Raises DataError."""
    shards: list[PlannedShard] = []
    pieces: list[SourcePart] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, filled
        if pieces:
            shards.append(PlannedShard(number=len(shards), pieces=tuple(pieces), text_bytes=filled))
        pieces, filled = [], 0

    for number, source in enumerate(sources):
        for begin, end, text_bytes in _cuts(source, options, shard_bytes):
            if filled + text_bytes > shard_bytes:
                close()
            pieces.append(SourcePart(source=number, begin=begin, end=end))
            filled += text_bytes
    close()
    return PreparePlan(
        sources=tuple(sources), tokenizer=tokenizer, options=options, shard_bytes=shard_bytes, shards=tuple(shards)
    )


def _cuts(source: Source, options: ReadOptions, shard_bytes: int) -> list[tuple[int, int, int]]:
    """Start, end and bytes of text of each piece. Start and end are bytes; for Parquet, they are row groups."""
    size = source.size_bytes
    if source.kind == "parquet":
        return _row_groups(source, shard_bytes)
    if is_split_by_lines(source, options):
        starts = range(0, size, shard_bytes)
        return [(at, min(at + shard_bytes, size), min(shard_bytes, size - at)) for at in starts]
    return [(0, size, size * (_COMPRESSION_FACTOR if source.compression else 1))] if size else []


def _row_groups(source: Source, shard_bytes: int) -> list[tuple[int, int, int]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(f"{source.name}: needs pyarrow: pip install pyarrow") from None
    try:
        with open_source(source) as file, pq.ParquetFile(file) as table:
            sizes = [table.metadata.row_group(number).total_byte_size for number in range(table.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{source.name}: is not a readable Parquet file ({first_line(error)})") from None
    cuts: list[tuple[int, int, int]] = []
    for number, size in enumerate(sizes):
        if cuts and cuts[-1][2] + size <= shard_bytes:
            cuts[-1] = (cuts[-1][0], number + 1, cuts[-1][2] + size)
        else:
            cuts.append((number, number + 1, size))
    return cuts


def difference(saved: dict[str, Any], found: dict[str, Any]) -> str:
    """Clause that says why shards of a saved plan cannot be reused for another plan; empty if they can."""
    saved, found = json.loads(json.dumps([saved, found]))
    if saved.get("tokenizer") != found["tokenizer"]:
        old, new = (plan.get("tokenizer", {}) for plan in (saved, found))
        return f"the tokenizer was {_tokenizer(old)} and is {_tokenizer(new)}"
    for name, value in found["options"].items():
        before = saved.get("options", {}).get(name)
        if before != value and (name, value) != ("skip_bad", True):  # without bad documents, shards are the same
            return f"{name} was {before!r} and is {value!r}"
    before_by_name = {source["name"]: source for source in saved.get("sources", [])}
    found_by_name = {source["name"]: source for source in found["sources"]}
    for name, source in found_by_name.items():
        if name not in before_by_name:
            return f"{name} was not among its sources"
        if source != before_by_name[name]:
            return f"{name} has changed since ({before_by_name[name]['size_bytes']} bytes then)"
    missing = next((name for name in before_by_name if name not in found_by_name), None)
    if missing:
        return f"{missing} was among its sources"
    return "" if list(before_by_name) == list(found_by_name) else "its sources were named in another order"


def _tokenizer(facts: dict[str, Any]) -> str:
    return f"{facts.get('name')} ({str(facts.get('sha256'))[:12]}, end token {facts.get('end_token')})"
