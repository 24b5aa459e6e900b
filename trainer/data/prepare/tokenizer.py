"""Tokenizers: any `tokenizer.json` through the `tokenizers` library, and "bytes", which needs none.

    tokenizer = load_tokenizer("bytes")                       # vocabulary 256, documents end with 0
    tokenizer = load_tokenizer("gpt2/tokenizer.json")         # the end token is found by its usual names
    tokens, lengths = tokenizer.encode(["some text", "more"]) # one array, each text with its end token

Special tokens that occur in a document are encoded like any other text, so that only the end of a document is an end
token. Truncation and padding configured in the file are turned off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.data.token_folder import DTYPES, DataError
from trainer.error_text import first_line

__all__ = ["BYTES", "Tokenizer", "TokenizerFacts", "load_tokenizer"]

BYTES = "bytes"
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]", "[EOS]")
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """Identity of a tokenizer, as stored in the manifest."""

    name: str
    sha256: str
    vocab_size: int
    end_token: str
    end_id: int
    unknown_id: int | None

    @property
    def dtype(self) -> str:
        return next(name for name in DTYPES if self.vocab_size - 1 <= np.iinfo(name).max)


class Tokenizer(Protocol):
    facts: TokenizerFacts

    def encode(self, texts: Sequence[str]) -> tuple[_Array, list[int]]:
        """Return the tokens of all texts, each with its end token, and the number of tokens of each text."""


class _Bytes:
    facts = TokenizerFacts(
        name=BYTES, sha256=hashlib.sha256(BYTES.encode()).hexdigest(), vocab_size=256, end_token="\\0", end_id=0,
        unknown_id=None,
    )  # fmt: skip

    def encode(self, texts: Sequence[str]) -> tuple[_Array, list[int]]:
        encoded = [text.encode() for text in texts]
        joined = b"\0".join([*encoded, b""])
        return np.frombuffer(joined, dtype=np.uint8), [len(text) + 1 for text in encoded]


class _FromFile:
    def __init__(self, library_tokenizer: Any, facts: TokenizerFacts) -> None:
        self._tokenizer = library_tokenizer
        self.facts = facts

    def encode(self, texts: Sequence[str]) -> tuple[_Array, list[int]]:
        tokens: list[int] = []
        lengths = []
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = encoding.ids
            tokens += ids
            tokens.append(self.facts.end_id)
            lengths.append(len(ids) + 1)
        return np.array(tokens, dtype=self.facts.dtype), lengths


def load_tokenizer(given: str, end_token: str = "") -> Tokenizer:
    """`given`: "bytes", a `tokenizer.json`, or a folder that holds one. Raises DataError."""
    if given == BYTES:
        if end_token:
            raise DataError("--end-token: bytes end documents with 0; leave the option out")
        return _Bytes()
    path = Path(given).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a tokenizer.json, or bytes") from None
    try:
        from tokenizers import Tokenizer as LibraryTokenizer
    except ImportError:
        raise DataError(f"{path}: needs tokenizers: pip install 'rankscope[train]', or use bytes") from None
    try:
        tokenizer = LibraryTokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise DataError(
            f"{path}: is not a tokenizer.json that the tokenizers library can read ({first_line(error)})"
        ) from None
    if getattr(tokenizer.model, "dropout", None):
        raise DataError(f"{path}: has dropout, the same text would get other tokens each time; remove model.dropout")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    end = end_token or next((name for name in _END_TOKENS if name in vocabulary), "")
    if end not in vocabulary:
        what = f"has no token {end!r}" if end else "has none of the usual tokens that end a document"
        raise DataError(f"{path}: {what}; name one of its tokens with --end-token")
    unknown = getattr(tokenizer.model, "unk_token", None)
    facts = TokenizerFacts(
        name=path.name,
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=max(vocabulary.values()) + 1,
        end_token=end,
        end_id=vocabulary[end],
        unknown_id=vocabulary.get(unknown) if isinstance(unknown, str) else None,
    )
    return _FromFile(tokenizer, facts)
