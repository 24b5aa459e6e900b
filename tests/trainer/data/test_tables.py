from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.config.config import DataConfig
from trainer.config.load import ConfigError
from trainer.data.corpus import Corpus, open_corpus


def opened(path: Path, cache: Path, *, vocab_size: int = 256, column: str = "", separator: int = 0) -> Corpus:
    config = DataConfig(path=[str(path)], cache_dir=str(cache), column=column, separator=separator)
    return open_corpus(config, vocab_size)


def test_a_folder_of_parquet_is_its_text_in_the_order_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["second", None, ""], "id": [1, 2, 3]}), folder / "b.parquet")
    pq.write_table(pa.table({"text": ["fírst", "one more"], "id": [1, 2]}), folder / "a.parquet")
    (folder / "README.md").write_text("not data")
    corpus = opened(tmp_path / "data", tmp_path / "cache")
    assert bytes(corpus.tokens) == "fírst\0one more\0second\0".encode()
    assert corpus.names == ("data/train/a.parquet", "data/train/b.parquet")
    assert corpus.locate(16) == ("data/train/b.parquet", 0)
    again = opened(tmp_path / "data", tmp_path / "cache")
    assert (again.digest, again.starts) == (corpus.digest, corpus.starts)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1


def test_lists_of_tokens_are_tokens_already(tmp_path: Path) -> None:
    file = tmp_path / "tokens.parquet"
    pq.write_table(pa.table({"input_ids": pa.array([[1, 70_000], [], None, [5]], pa.list_(pa.int32()))}), file)
    corpus = opened(file, tmp_path / "cache", vocab_size=80_000, separator=50_256)
    assert corpus.tokens.tolist() == [1, 70_000, 50_256, 5, 50_256]
    with pytest.raises(ConfigError, match="the data has tokens up to 70000"):
        opened(file, tmp_path / "cache", vocab_size=60_000, separator=50_256)


def test_what_datasets_has_saved(tmp_path: Path) -> None:
    """Its `save_to_disk`: Arrow streams beside two JSON files, and caches of its own that are no data."""
    for name, text in (
        ("data-00000-of-00002.arrow", "one"),
        ("data-00001-of-00002.arrow", "two"),
        ("cache-1.arrow", "x"),
    ):
        table = pa.table({"text": [text]})
        with pa.OSFile(str(tmp_path / name), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "state.json").write_text("{}")
    assert bytes(opened(tmp_path, tmp_path / "cache").tokens) == b"one\0two\0"


def test_a_disk_that_fills_up_leaves_no_half_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "words.parquet")
    write_text = Path.write_text

    def fill_up(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill_up)
        with pytest.raises(ConfigError, match="No space left"):
            opened(tmp_path / "words.parquet", tmp_path / "cache")
    assert bytes(opened(tmp_path / "words.parquet", tmp_path / "cache").read(0, 8)) == b"one\0two\0"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "score": [1.5]}), file)
    for column, said in (
        ("", "name the one to train on"),
        ("txt", "has body, score"),
        ("score", "must be text or lists"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            opened(file, tmp_path / "cache", column=column)
        assert "\n" not in str(error.value)
    assert bytes(opened(file, tmp_path / "cache", column="body").tokens) == b"x\0"
    file.write_bytes(b"PAR1 no, it is not PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(file, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_many_rows_come_in_blocks(tmp_path: Path) -> None:
    rows = np.arange(30_000) % 250
    file = tmp_path / "many.parquet"
    pq.write_table(pa.table({"tokens": [[int(number)] for number in rows]}), file)
    corpus = opened(file, tmp_path / "cache", separator=255)
    assert corpus.tokens[::2].tolist() == rows.tolist()
    assert set(corpus.tokens[1::2].tolist()) == {255}


def test_a_list_with_a_missing_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.parquet"
    pq.write_table(pa.table({"tokens": pa.array([[1, None, 3]], pa.list_(pa.int32()))}), file)
    with pytest.raises(ConfigError, match=r"a list of tokens\.parquet lacks a token"):
        opened(file, tmp_path / "cache")


def test_the_separator_may_be_larger_than_the_columns_type(tmp_path: Path) -> None:
    file = tmp_path / "tokens.parquet"
    pq.write_table(pa.table({"tokens": pa.array([[1, 2]], pa.list_(pa.int16()))}), file)
    corpus = opened(file, tmp_path / "cache", vocab_size=60_000, separator=50_256)
    assert corpus.tokens.tolist() == [1, 2, 50_256]
