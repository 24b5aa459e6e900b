"""Read the documents in a piece of a source: whole text files, lines of text, lines of JSON, rows of Parquet.

    reader = DocumentReader(options)
    for text in reader.read(source, piece): ...
    reader.num_empty, reader.num_skipped

A piece contains every line that begins in it, even if the line ends in another piece, so each line belongs to exactly
one piece. Invalid documents (not JSON, without text, not UTF-8) are an error with file and position, or are counted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from lzma import LZMAError
from typing import Any, Literal

from trainer.data.prepare.sources import Source, open_source
from trainer.data.token_folder import DataError, SourcePart
from trainer.error_text import first_line

__all__ = ["MAX_DOCUMENT_BYTES", "DocumentReader", "ReadOptions", "is_split_by_lines"]

MAX_DOCUMENT_BYTES = 256 << 20
"""Maximum size of a document, which is encoded in memory as a whole."""
_FIELDS = ("text", "content")
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options for reading. `text_field` empty: `text` or `content`, whichever exists."""

    text_field: str = ""
    document: Literal["file", "line"] = "file"  # what counts as one document in a text file
    skip_bad: bool = False
    refuse_nul: bool = False  # needed by the tokenizer "bytes", in which 0 marks the end of a document


def is_split_by_lines(source: Source, options: ReadOptions) -> bool:
    """True if pieces of the source are ranges of bytes."""
    by_line = source.kind == "jsonl" or (source.kind == "text" and options.document == "line")
    return by_line and source.compression is None


@dataclass(slots=True)
class DocumentReader:
    """Reads pieces one after another, and counts invalid documents."""

    options: ReadOptions
    num_empty: int = 0
    num_skipped: int = 0
    _column: dict[str, str] = field(default_factory=dict)

    def read(self, source: Source, piece: SourcePart) -> Iterator[str]:
        """Documents in order. Raises DataError, one line."""
        try:
            if source.kind == "parquet":
                found = self._rows(source, piece)
            elif source.kind == "text" and self.options.document == "file":
                found = self._whole(source)
            else:
                found = self._lines(source, piece)
            for text in found:
                if not text:
                    self.num_empty += 1
                elif self.options.refuse_nul and "\0" in text:
                    self._bad(f"{source.name}: a document holds the byte 0, which ends documents")
                else:
                    yield text
        except (OSError, EOFError, zlib.error, LZMAError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            raise DataError(f"{source.name}: cannot be read ({reason})") from None

    def _whole(self, source: Source) -> Iterator[str]:
        with open_source(source) as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            raise DataError(
                f"{source.name}: is one document of more than {MAX_DOCUMENT_BYTES >> 20} MiB; "
                "use --document line, or split the file"
            )
        yield from self._decoded(content, source, 0)

    def _lines(self, source: Source, piece: SourcePart) -> Iterator[str]:
        is_json = source.kind == "jsonl"
        whole = source.compression is not None
        with open_source(source) as file:
            at = 0 if whole else piece.begin
            if at:
                file.seek(at - 1)
                # skip the rest of a line that began in the previous piece; empty if a line begins here
                at += len(file.readline()) - 1
            while whole or at < piece.end:
                line = file.readline(MAX_DOCUMENT_BYTES + 1)
                if not line:
                    break
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise DataError(
                        f"{source.name}: the line at byte {at} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB"
                    )
                content = line.rstrip(b"\r\n")
                if is_json and not content.strip():
                    at += len(line)
                    continue
                yield from self._from_json(content, source, at) if is_json else self._decoded(content, source, at)
                at += len(line)

    def _from_json(self, line: bytes, source: Source, at: int) -> Iterator[str]:
        place = f"{source.name}: the line at byte {at}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._bad(f"{place} is not JSON ({first_line(error)})")
            return
        if not isinstance(record, dict):
            self._bad(f"{place} is not a JSON object")
            return
        name = self.options.text_field or next((name for name in _FIELDS if name in record), "")
        text = record.get(name)
        if not isinstance(text, str):
            wanted = f"field {name!r}" if name else "field text or content"
            self._bad(f"{place} has no {wanted} of text (it has {', '.join(map(str, list(record)[:10]))}): see --field")
            return
        try:
            text.encode()  # a lone surrogate is valid JSON, but not valid text
        except UnicodeEncodeError:
            self._bad(f"{place} is not valid Unicode")
            return
        yield text

    def _decoded(self, content: bytes, source: Source, at: int) -> Iterator[str]:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            self._bad(f"{source.name}: is not UTF-8 at byte {at + error.start}")
            return
        yield text

    def _rows(self, source: Source, piece: SourcePart) -> Iterator[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with open_source(source) as file, pq.ParquetFile(file) as table:
                name = self._text_column(source, table.schema_arrow)
                batches = table.iter_batches(
                    batch_size=_ROWS_AT_ONCE, row_groups=range(piece.begin, piece.end), columns=[name]
                )
                for batch in batches:
                    yield from (value or "" for value in batch.column(0).to_pylist())
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{source.name}: cannot be read ({first_line(error)})") from None

    def _text_column(self, source: Source, schema: Any) -> str:
        import pyarrow as pa

        wanted = (self.options.text_field,) if self.options.text_field else _FIELDS
        name = next((name for name in wanted if name in schema.names), None)
        if name is None:
            raise DataError(
                f"{source.name}: has no column {' or '.join(wanted)} but {', '.join(schema.names[:20])}: see --field"
            )
        kind = schema.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{source.name}: column {name} is {kind}, not text; name another with --field")
        return str(name)

    def _bad(self, what: str) -> None:
        if not self.options.skip_bad:
            raise DataError(f"{what}; correct it, or leave such documents out with --skip-bad")
        self.num_skipped += 1
