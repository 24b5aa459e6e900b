"""Prepared folders in the trainer: the same tokens for any reader, and what is damaged, missing or changed is named."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.data.prepare.prepared_folders import documents, prepare_lines, small_tokenizer
from trainer.config.config import DataConfig
from trainer.config.load import ConfigError
from trainer.data.batches import BatchStream
from trainer.data.corpus import open_corpus, open_validation
from trainer.data.mixture import Mixture
from trainer.data.prefetch import Prefetcher
from trainer.data.prepared import PreparedCorpus
from trainer.data.token_folder import BLOCK_BYTES, DamagedDataError, DataError, read_manifest

TEXTS = documents(300)
ALL = "".join(f"{text}\0" for text in TEXTS).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some shards of about two blocks each."""
    folder = prepare_lines(tmp_path / "web", TEXTS, shard_bytes=2 * BLOCK_BYTES + 1000)
    assert len(read_manifest(folder).shards) > 1
    return folder


def stream_of(folder: Path, **named: int) -> BatchStream:
    return BatchStream(PreparedCorpus(folder), seq_len=32, global_batch_size=12, seed=3, validation_ratio=0, **named)


def test_any_part_is_read_over_blocks_and_shards(folder: Path) -> None:
    corpus = PreparedCorpus(folder)
    assert corpus.num_tokens == len(ALL)
    random = np.random.default_rng(0)
    for start in [0, *random.integers(0, len(ALL) - 1, 50).tolist(), len(ALL) - 1]:
        count = int(random.integers(1, min(3 * BLOCK_BYTES, len(ALL) - start) + 1))
        assert corpus.read(start, count).tobytes() == ALL[start : start + count]
    assert corpus.read(0, len(ALL)).tobytes() == ALL


@pytest.mark.parametrize("data_size", [1, 3, 12])
def test_every_number_of_data_ranks_reads_each_sequence_once(folder: Path, data_size: int) -> None:
    single = stream_of(folder)
    ranks = [stream_of(folder) for _ in range(data_size)]
    num_batches = single.num_sequences // 12
    seen: list[int] = []
    for index in range(num_batches):
        whole = single.batch(index)
        parts = [stream.batch(index, rank, data_size) for rank, stream in enumerate(ranks)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        for row, number in enumerate(whole.sample_ids):
            text = ALL[number * 32 : number * 32 + 33]
            assert [*whole.inputs[row].tolist(), int(whole.targets[row, -1])] == list(text)
        seen += whole.sample_ids
    assert len(set(seen)) == len(seen) == num_batches * 12


def test_a_place_is_named_by_source_and_document(tmp_path: Path) -> None:
    folder = prepare_lines(tmp_path / "web", TEXTS, tokenizer=small_tokenizer(tmp_path), shard_bytes=3000)
    manifest = read_manifest(folder)
    assert len(manifest.shards) > 3
    corpus = PreparedCorpus(folder)
    end_id = manifest.tokenizer["end_id"]
    starts = [0, *(np.flatnonzero(corpus.read(0, corpus.num_tokens) == end_id) + 1)[:-1].tolist()]
    for number in (0, 1, 150, 299):
        assert corpus.locate(starts[number]) == (f"{tmp_path}/web/source.jsonl, document {number}", 0)
    assert corpus.locate(starts[7] + 2)[1] == 2


def damage(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_named_by_who_reads_it(folder: Path) -> None:
    corpus = PreparedCorpus(folder)
    damage(folder / "tokens-000000.bin", BLOCK_BYTES + 5)
    assert corpus.read(0, BLOCK_BYTES).tobytes() == ALL[:BLOCK_BYTES]
    with pytest.raises(DamagedDataError) as caught:
        corpus.read(BLOCK_BYTES + 100, 10)
    words = f"tokens-000000.bin: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} differ from what was prepared"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_changes_while_it_is_read_are_named(folder: Path, tmp_path: Path) -> None:
    first = read_manifest(folder).shards[0].num_tokens
    corpus = PreparedCorpus(folder)
    corpus.read(0, 10)
    os.truncate(folder / "tokens-000000.bin", 100)  # of a map, the next read would be a SIGBUS
    with pytest.raises(DamagedDataError, match=r"tokens-000000\.bin: bytes 0 to"):
        corpus.read(0, 10)
    other = prepare_lines(tmp_path / "other", documents(300, seed=9), shard_bytes=2 * BLOCK_BYTES + 1000)
    for name in ("tokens", "documents", "blocks"):  # a folder that was prepared anew, with hashes that fit
        (folder / f"{name}-000001.bin").write_bytes((other / f"{name}-000001.bin").read_bytes())
    with pytest.raises(DamagedDataError, match=r"blocks-000001\.bin: is not what the manifest says"):
        corpus.read(first + 10, 10)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damage_is_one_line_through_data_workers_too(folder: Path, num_workers: int) -> None:
    for number, shard in enumerate(read_manifest(folder).shards):
        damage(folder / f"tokens-{number:06}.bin", shard.num_tokens // 2)
    loader = Prefetcher(stream_of(folder), 0, 1, num_workers=num_workers, ahead=1, pin=False)
    try:
        with pytest.raises(DamagedDataError, match=r"^/[^\n]*tokens-00000\d\.bin: bytes[^\n]*prepare it again$"):
            [loader.batch(index) for index in range(100)]
        assert not multiprocessing.active_children()
    finally:
        loader.close()


def test_folders_that_cannot_be_used_are_named(folder: Path) -> None:
    manifest = folder / "manifest.json"
    content = manifest.read_text()
    for path, words in (
        (folder / "tokens-000000.bin", "tokens-000000.bin: is missing"),
        (manifest, "is missing, so the preparation is incomplete: run the same `rankscope prepare` again"),
    ):
        moved = path.rename(path.with_suffix(".away"))
        with pytest.raises(DataError, match=words):
            open_corpus(DataConfig(path=[str(folder)]), 256)
        moved.rename(path)
    for text, words in (
        ("{", "is damaged"),
        (content.replace("rankscope-tokens", "other"), "is version 1 of other"),
        (content.replace('"uint8"', '"float8"'), "dtype 'float8' must be one of"),
    ):
        manifest.write_text(text)
        with pytest.raises(DataError, match=words):
            PreparedCorpus(folder)
    manifest.write_text(content)
    (folder / "tokens-000000.bin").write_bytes(b"short")
    with pytest.raises(DataError, match=r"tokens-000000\.bin: has 5 bytes, the manifest says"):
        PreparedCorpus(folder)


def test_configuration_that_does_not_fit_is_named(tmp_path: Path) -> None:
    web, code = (prepare_lines(tmp_path / name, TEXTS) for name in ("web", "code"))
    bpe = prepare_lines(tmp_path / "bpe", TEXTS, tokenizer=small_tokenizer(tmp_path))
    text = tmp_path / "a.txt"
    text.write_text("abc")
    vocabulary = json.loads((bpe / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    for values, size, words in (
        ({"path": [bpe]}, 256, f"model.vocab_size = 256: .* was prepared with a vocabulary of {vocabulary}"),
        ({"path": [web, bpe]}, 300, "were prepared with different tokenizers"),
        ({"path": [web, text]}, 256, "a.txt': is not prepared, the others are"),
        ({"path": [web, web]}, 256, "names a folder twice; use data.weights"),
        ({"path": [text], "weights": [1.0]}, 256, "need folders of `rankscope prepare`"),
        ({"path": [web], "document_mask": True, "separator": 10}, 256, r"data.separator = 10: .* end with 0"),
    ):
        config = DataConfig.model_validate({**values, "path": [str(path) for path in values["path"]]})
        with pytest.raises(ConfigError, match=words):
            open_corpus(config, size)
    for values, words in (
        ({"weights": [1.0]}, "needs a number for each of the 2"),
        ({"weights": [1.0, -1.0]}, "none may be negative"),
        ({"epochs": [0.0, 0.0]}, "one must be above 0"),
        ({"epochs": [1.0, 1.0], "weights": [1.0, 1.0]}, "are mutually exclusive"),
    ):
        with pytest.raises(ValueError, match=words):
            DataConfig.model_validate({"path": [str(web), str(code)], **values})
    mixture = open_corpus(DataConfig(path=[str(web), str(code)]), 256)
    assert isinstance(mixture, Mixture)
    assert len(mixture.parts) == 2
    with pytest.raises(ConfigError, match=r"data\.validation\.late = .*: is not a folder of"):
        open_validation(DataConfig(validation={"late": str(text)}), 256)


def test_the_same_tokens_have_the_same_digest(tmp_path: Path) -> None:
    one, same = (PreparedCorpus(prepare_lines(tmp_path / name, TEXTS)) for name in ("one", "same"))
    other = PreparedCorpus(prepare_lines(tmp_path / "other", TEXTS[::-1]))
    assert one.digest == same.digest != other.digest
