"""The tokens to train on: prepared folders, or text as bytes, columns of tables, a nanoGPT `.bin` as one memory map.

    corpus = open_corpus(config.data, vocab_size=256)
    corpus.read(0, 10)                   # numpy array, one integer per token
    corpus.locate(123_456)               # ("asyncio/base_events.py", 1817): file and byte

Without `data.path` the text is the Python sources of the interpreter's standard library: real text that exists on every
machine. Files are sorted and separated by a zero byte. The bytes are written once to the cache folder, named by a hash
of the files' contents, and mapped from there, so that ranks share the pages.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.config import DataConfig
from trainer.config.load import ConfigError
from trainer.data.mixture import Mixture, TokenSource
from trainer.data.prepared import PreparedCorpus
from trainer.data.tables import table_files, token_blocks
from trainer.data.token_folder import is_prepared

__all__ = ["Corpus", "open_corpus", "open_validation"]

SEPARATOR = b"\0"
_BIN_SAMPLES = 64
_BIN_SAMPLE_BYTES = 1 << 14
_BIN_DTYPES = {"uint8", "uint16", "uint32"}
# On some systems installed packages are in the library's folder; they differ between machines.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", ".git"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokens in order, with the hash of their source and the start of each file."""

    tokens: np.ndarray[Any, Any]
    digest: str
    names: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()  # token at which each named file begins

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def read(self, start: int, count: int) -> np.ndarray[Any, Any]:
        """Return `count` tokens from position `start`."""
        return self.tokens.view(np.ndarray)[start : start + count]  # slicing a memmap itself takes ten times as long

    def locate(self, position: int) -> tuple[str, int]:
        """File and token within it for a position in `tokens`; ("", position) if there are no files to name."""
        number = bisect_right(self.starts, position) - 1
        return (self.names[number], position - self.starts[number]) if number >= 0 else ("", position)


def open_corpus(config: DataConfig, vocab_size: int) -> TokenSource | Mixture:
    """Open `data.path`. Raises ConfigError for paths that are missing, empty or not of the expected kind."""
    if not config.path:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [(path.relative_to(root).as_posix(), path) for path in _files_below(root, {".py"})]
        return _open_text(files, config, vocab_size)
    paths = [Path(text).expanduser() for text in config.path]
    for path in paths:
        if not path.exists():
            raise ConfigError(f"data.path = {str(path)!r}: no such file or folder")
        if not (path.is_file() or path.is_dir()):  # reading a pipe or a device may never end
            raise ConfigError(f"data.path = {str(path)!r}: is neither a file nor a folder")
    if any(is_prepared(path) for path in paths):
        return _open_prepared(paths, config, vocab_size)
    if config.weights or config.epochs:
        raise ConfigError("data.weights and data.epochs: need folders of `rankscope prepare` in data.path")
    if any(path.suffix == ".bin" for path in paths):
        if len(paths) > 1:
            raise ConfigError(f"data.path = {config.path}: a .bin must be the only path")
        return _open_bin(paths[0], vocab_size)
    tables = [(path, file) for path in paths for file in table_files(path)]
    if tables:
        return _open_tables(tables, config, vocab_size)
    files = []
    for path in paths:
        below = _files_below(path, None) if path.is_dir() else [path]
        files += [(file.relative_to(path.parent).as_posix(), file) for file in below]
    return _open_text(files, config, vocab_size)


def open_validation(config: DataConfig, vocab_size: int) -> dict[str, TokenSource]:
    """Open `data.validation`; returns corpora by name. Raises ConfigError."""
    found: dict[str, TokenSource] = {}
    for name, folder in config.validation.items():
        if not is_prepared(Path(folder).expanduser()):
            raise ConfigError(f"data.validation.{name} = {folder!r}: is not a folder of `rankscope prepare`")
        found[name] = _checked_corpus(Path(folder).expanduser(), config, vocab_size)
    return found


def _open_prepared(paths: list[Path], config: DataConfig, vocab_size: int) -> TokenSource | Mixture:
    for path in paths:
        if not is_prepared(path):
            raise ConfigError(f"data.path = {str(path)!r}: is not prepared, the others are: rankscope prepare {path}")
    corpora = [_checked_corpus(path, config, vocab_size) for path in paths]
    first = corpora[0]
    for corpus in corpora:
        if corpus.manifest.tokenizer["sha256"] != first.manifest.tokenizer["sha256"]:
            raise ConfigError(
                f"data.path: {first.folder} and {corpus.folder} were prepared with different tokenizers "
                f"({first.manifest.tokenizer['name']}, {corpus.manifest.tokenizer['name']})"
            )
    if len(corpora) == 1:
        return first
    names = [corpus.name for corpus in corpora]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise ConfigError("data.path: names a folder twice; use data.weights or data.epochs to read it more often")
    return Mixture(
        parts=dict(zip(names, corpora, strict=True)), weights=tuple(config.weights), epochs=tuple(config.epochs)
    )


def _checked_corpus(folder: Path, config: DataConfig, vocab_size: int) -> PreparedCorpus:
    corpus = PreparedCorpus(folder)
    facts = corpus.manifest.tokenizer
    if facts["vocab_size"] > vocab_size:
        raise ConfigError(
            f"model.vocab_size = {vocab_size}: {folder} was prepared with a vocabulary of {facts['vocab_size']} "
            f"({facts['name']}), so it must be at least that"
        )
    if config.document_mask and config.separator != facts["end_id"]:
        raise ConfigError(
            f"data.separator = {config.separator}: documents of {folder} end with {facts['end_id']}, which "
            "data.document_mask needs as data.separator"
        )
    return corpus


def _files_below(root: Path, suffixes: set[str] | None) -> list[Path]:
    """Regular files in sorted order, the same on every machine with the same tree; hidden files are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if (
                not name.startswith(".")
                and not path.is_symlink()
                and path.is_file()
                and (suffixes is None or path.suffix in suffixes)
            ):
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _cache_dir(config: DataConfig) -> Path:
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rankscope"


def _open_text(files: Iterable[tuple[str, Path]], config: DataConfig, vocab_size: int) -> Corpus:
    if vocab_size < 256:
        raise ConfigError(f"model.vocab_size = {vocab_size}: bytes of text need at least 256")
    names: list[str] = []
    starts: list[int] = []
    parts: list[bytes] = []
    size = 0
    digest = hashlib.sha256()
    for name, path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"data.path = {str(path)!r}: cannot be read ({error.strerror})") from error
        if not content:
            continue
        names.append(name)
        starts.append(size)
        parts += (content, SEPARATOR)
        size += len(content) + 1
        digest.update(content + SEPARATOR)
    if not size:
        raise ConfigError(f"data.path = {config.path}: holds no text")
    key = digest.hexdigest()[:32]
    tokens = _cached(_cache_dir(config) / f"bytes-{key}.bin", parts, size)
    return Corpus(tokens=tokens, digest=key, names=tuple(names), starts=tuple(starts))


def _cached(path: Path, parts: list[bytes], size: int) -> np.ndarray[Any, Any]:
    """Map the bytes from the cache, which is written first if necessary. If it cannot be written, the bytes are kept in
    memory.
    """
    try:
        if not path.exists() or path.stat().st_size != size:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Ranks do this concurrently. Each writes a separate file with the same bytes, and the last rename wins.
            scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            scratch.write_bytes(b"".join(parts))
            os.replace(scratch, path)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError:
        return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _open_tables(tables: list[tuple[Path, Path]], config: DataConfig, vocab_size: int) -> Corpus:
    """Tokens of all files, concatenated; one rank per machine writes them while the others wait."""
    described = [[path.name, file.as_posix(), file.stat().st_size, file.stat().st_mtime_ns] for path, file in tables]
    key = hashlib.sha256(json.dumps([described, config.column, config.separator]).encode()).hexdigest()[:32]
    cache = _cache_dir(config)
    place, about = cache / f"table-{key}.bin", cache / f"table-{key}.json"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"table-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place.exists() and about.exists()):
                _write_tables(tables, config, place, about)
    except OSError as error:
        raise ConfigError(f"data.cache_dir = {str(cache)!r}: cannot be written ({error.strerror})") from error
    index = json.loads(about.read_text(encoding="utf-8"))
    if index["largest"] >= vocab_size:
        raise ConfigError(f"model.vocab_size = {vocab_size}: the data has tokens up to {index['largest']}")
    tokens = np.memmap(place, dtype=index["dtype"], mode="r")
    return Corpus(tokens=tokens, digest=index["digest"], names=tuple(index["names"]), starts=tuple(index["starts"]))


def _write_tables(tables: list[tuple[Path, Path]], config: DataConfig, place: Path, about: Path) -> None:
    names, starts = [], []
    size, largest, dtype = 0, 0, ""
    digest = hashlib.sha256()
    scratch = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as out:
            for path, file in tables:
                names.append(file.name if path == file else file.relative_to(path.parent).as_posix())
                starts.append(size)
                for block in token_blocks(file, column=config.column, separator=config.separator):
                    dtype = dtype or block.dtype.name
                    if block.dtype.name != dtype:
                        raise ConfigError(f"data.path: {file.name} holds {block.dtype}, the files before it {dtype}")
                    size += len(block)
                    largest = max(largest, int(block.max(initial=0)))
                    digest.update(block.tobytes())
                    out.write(block.tobytes())
        if not size:
            raise ConfigError("data.path: holds no tokens")
        index = {
            "dtype": dtype,
            "digest": digest.hexdigest()[:32],
            "largest": largest,
            "names": names,
            "starts": starts,
        }
        os.replace(scratch, place)
        scratch.write_text(json.dumps(index), encoding="utf-8")
        os.replace(scratch, about)
    finally:
        scratch.unlink(missing_ok=True)


def _open_bin(path: Path, vocab_size: int) -> Corpus:
    """Open a flat array of tokens with a sidecar: {"dtype": "uint16", "vocab_size": 50257, "num_tokens": 1000000}."""
    sidecar = path.with_suffix(".json")
    if not sidecar.exists():
        raise ConfigError(f"data.path = {str(path)!r}: needs {sidecar.name} with dtype, vocab_size and num_tokens")
    try:
        described = json.loads(sidecar.read_text(encoding="utf-8"))
        dtype, vocab, count = described["dtype"], int(described["vocab_size"]), int(described["num_tokens"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"data.path = {str(sidecar)!r}: must be a JSON object with dtype, vocab_size and num_tokens"
        ) from error
    if dtype not in _BIN_DTYPES:
        raise ConfigError(f"data.path = {str(sidecar)!r}: dtype {dtype!r} must be one of {sorted(_BIN_DTYPES)}")
    if vocab > vocab_size:
        raise ConfigError(
            f"model.vocab_size = {vocab_size}: {path.name} has tokens up to {vocab}, so it must be at least {vocab}"
        )
    expected, size = count * np.dtype(dtype).itemsize, path.stat().st_size
    if size != expected or not count:
        raise ConfigError(f"data.path = {str(path)!r}: {size} bytes, but {sidecar.name} says {expected}")
    # The file may have terabytes, so only its description and evenly spaced blocks are hashed.
    digest = hashlib.sha256(json.dumps([dtype, vocab, count]).encode())
    with path.open("rb") as file:
        for number in range(_BIN_SAMPLES):
            file.seek(max(0, size - _BIN_SAMPLE_BYTES) * number // (_BIN_SAMPLES - 1))
            digest.update(file.read(_BIN_SAMPLE_BYTES))
    return Corpus(tokens=np.memmap(path, dtype=dtype, mode="r"), digest=digest.hexdigest()[:32])
