"""Every document of the sources is in the token files once, in order, whatever the format, cuts and processes."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec import AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.data.prepare.prepared_folders import (
    contents,
    documents,
    documents_in,
    prepare_lines,
    prepare_sources,
    small_tokenizer,
    write_jsonl,
)
from trainer.data.prepare.documents import DocumentReader, ReadOptions
from trainer.data.prepare.plan import make_plan
from trainer.data.prepare.sources import Source, find_sources
from trainer.data.prepare.tokenizer import load_tokenizer
from trainer.data.token_folder import DataError, read_manifest

TEXTS = documents(60)


def write_parquet(path: Path, texts: list[str | None], column: str = "text", row_group_size: int = 7) -> Path:
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), path, row_group_size=row_group_size)
    return path


def test_each_format_gives_the_same_documents(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl.read_bytes()))
    table = write_parquet(tmp_path / "a.parquet", list(TEXTS))
    lines = tmp_path / "a.txt"
    lines.write_text("\n".join(TEXTS), encoding="utf-8")  # the last line without an end
    by_line = ReadOptions(document="line")
    for number, (source, options) in enumerate([(jsonl, None), (packed, None), (table, None), (lines, by_line)]):
        done = prepare_sources(tmp_path / str(number), source, tokenizer=tokenizer, shard_bytes=500, options=options)
        assert documents_in(tmp_path / str(number)) == TEXTS
        assert done.manifest.num_documents == len(TEXTS)
        assert (len(done.manifest.shards) > 5) == (source is not packed)  # a compressed file cannot be cut
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text + "\r\n", encoding="utf-8", newline="")
    prepare_sources(tmp_path / "files", folder, tokenizer=tokenizer, shard_bytes=500)
    assert documents_in(tmp_path / "files") == [text + "\r\n" for text in TEXTS]


@given(lines=st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=20), size=st.integers(1, 9))
def test_pieces_that_divide_a_file_divide_its_lines(tmp_path_factory: Any, lines: list[bytes], size: int) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "lines.txt"
    path.write_bytes(b"\n".join(line.hex().encode() for line in lines))
    options = ReadOptions(document="line")
    plan = make_plan(find_sources([str(path)]), load_tokenizer("bytes").facts, options, shard_bytes=size)
    reader = DocumentReader(options)
    found = [text for shard in plan.shards for piece in shard.pieces for text in reader.read(plan.sources[0], piece)]
    assert found == [line.hex() for line in lines if line]


def test_output_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    sources = [write_jsonl(tmp_path / f"{seed}.jsonl", documents(40, seed=seed)) for seed in range(3)]
    for number in (1, 3):
        done = prepare_sources(
            tmp_path / f"by-{number}", *sources, tokenizer=tokenizer, num_processes=number, shard_bytes=2000
        )
    assert len(done.manifest.shards) > 6
    assert contents(tmp_path / "by-1") == contents(tmp_path / "by-3")
    assert documents_in(tmp_path / "by-3") == [text for seed in range(3) for text in documents(40, seed=seed)]
    assert not list((tmp_path / "by-3").glob("shard-*"))


def test_manifest_has_counts_hashes_and_the_tokenizer(tmp_path: Path) -> None:
    import hashlib

    folder = prepare_lines(tmp_path, ["abc", "", "de"], tokenizer="bytes")
    manifest = read_manifest(folder)
    (shard,) = manifest.shards
    assert (folder / "tokens-000000.bin").read_bytes() == b"abc\0de\0"
    assert (manifest.num_tokens, manifest.num_documents, shard.num_empty) == (7, 2, 1)
    assert (manifest.dtype, manifest.tokenizer["name"], manifest.tokenizer["end_id"]) == ("uint8", "bytes", 0)
    assert shard.tokens_sha256 == hashlib.sha256(b"abc\0de\0").hexdigest()
    assert manifest.largest_token == ord("e")
    assert prepare_sources(folder, tmp_path / "source.jsonl").already_complete


def test_tokens_of_a_document_are_text_whatever_it_holds(tmp_path: Path) -> None:
    cut = {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}}
    texts = ["a <|endoftext|> b", " ".join(["rank"] * 50)]
    folder = prepare_lines(tmp_path, texts, tokenizer=small_tokenizer(tmp_path, **cut))
    assert documents_in(folder) == texts  # and no end token within one: `documents_in` looks


def test_dtype_follows_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    for size, expected in ((70_000, "uint32"), (60_000, "uint16")):
        words = {**{f"w{number}": number for number in range(size - 2)}, "</s>": size - 2, "<unk>": size - 1}
        model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
        path.write_text(json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}))
        done = prepare_sources(
            tmp_path / expected, write_jsonl(tmp_path / "a.jsonl", ["w9 w59000 other"]), tokenizer=str(path)
        )
        assert done.manifest.dtype == expected
        assert done.manifest.tokenizer["end_token"] == "</s>"
        assert done.manifest.shards[0].num_unknown == 1


def test_addresses_folders_and_globs(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, texts in (("b", TEXTS[:5]), ("a", TEXTS[5:9])):
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
        memory.pipe(f"/texts/{name}.jsonl", (tmp_path / f"{name}.jsonl").read_bytes())
    memory.pipe("/texts/README.md", b"no data")
    expected = [*TEXTS[5:9], *TEXTS[:5]]
    for number, address in enumerate(["memory://texts", "memory://texts/*.jsonl", f"file://{tmp_path}/[ab].jsonl"]):
        prepare_sources(tmp_path / str(number), address)
        assert documents_in(tmp_path / str(number)) == expected
    (named,) = find_sources(["memory://texts/a.jsonl"])
    assert named.name == "memory:///texts/a.jsonl"


def test_unfinished_preparation_takes_other_options_until_a_shard_is_done(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS, field="body")
    with pytest.raises(DataError, match="--field"):
        prepare_sources(tmp_path / "out", source)
    prepare_sources(tmp_path / "out", source, options=ReadOptions(text_field="body"))
    assert documents_in(tmp_path / "out") == TEXTS
    with pytest.raises(DataError, match="was prepared from something else: text_field was 'body' and is ''"):
        prepare_sources(tmp_path / "out", source)
    with pytest.raises(DataError, match=r"the tokenizer was bytes .* and is small-tokenizer\.json"):
        prepare_sources(tmp_path / "out", source, tokenizer=small_tokenizer(tmp_path))


def test_changed_source_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [write_jsonl(tmp_path / f"{name}.jsonl", TEXTS) for name in "ab"]
    prepare_sources(tmp_path / "out", *sources)
    os.utime(sources[1], ns=(1, 1))
    with pytest.raises(DataError, match=r"b\.jsonl has changed since"):
        prepare_sources(tmp_path / "out", *sources)

    read = DocumentReader.read

    def read_and_append(self: DocumentReader, source: Source, piece: Any) -> Any:
        yield from read(self, source, piece)
        with open(source.name, "a") as file:
            file.write("{}\n")

    monkeypatch.setattr(DocumentReader, "read", read_and_append)
    with pytest.raises(DataError, match=r"a\.jsonl: has changed since this preparation began; delete"):
        prepare_sources(tmp_path / "other", *sources)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', ["a.jsonl: the line at byte 14 is not JSON", "--skip-bad"]),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', ["the line at byte 14 is not a JSON object"]),
        ("a.jsonl", b'{"text": "a"}\n{"url": 1}\n', ["no field text or content", "it has url", "--field"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}\n', ["not valid Unicode"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\\u0000"}\n', ["the byte 0, which ends documents"]),
        ("a.txt", b"a\nb\xff\n", ["a.txt: is not UTF-8 at byte 3"]),
    ],
)
def test_what_is_no_document_is_named_or_counted(tmp_path: Path, name: str, content: bytes, words: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare_sources(tmp_path / "out", tmp_path / name, options=ReadOptions(document="line"))
    assert all(word in str(caught.value) for word in words)
    assert "\n" not in str(caught.value)
    done = prepare_sources(tmp_path / "out", tmp_path / name, options=ReadOptions(document="line", skip_bad=True))
    assert documents_in(tmp_path / "out") == ["a"]
    assert done.manifest.shards[0].num_skipped == 1


def test_what_cannot_be_prepared_is_one_line(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-20])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "no.json").write_text("{}")
    write_parquet(tmp_path / "url.parquet", ["a"], column="url")
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "thesis.doc").write_text("")
    dropout = small_tokenizer(tmp_path)
    changed = json.loads(Path(dropout).read_text())
    changed["model"]["dropout"] = 0.1
    (tmp_path / "dropout.json").write_text(json.dumps(changed))
    cases: list[tuple[list[str | Path], str, str]] = [
        ([tmp_path / "none.jsonl"], "bytes", "none.jsonl: no such file or folder"),
        ([f"{tmp_path}/none-*"], "bytes", "names no file; check the path or the pattern"),
        ([good, f"{tmp_path}/g*.jsonl"], "bytes", "would be there twice: name it once"),
        ([tmp_path / "broken.parquet"], "bytes", "is not a readable Parquet file"),
        ([tmp_path / "broken.jsonl.gz"], "bytes", "broken.jsonl.gz: cannot be read"),
        ([tmp_path / "url.parquet"], "bytes", "has no column text or content but id, url: see --field"),
        ([tmp_path / "empty.jsonl"], "bytes", "no source holds a document"),
        (["nope://bucket/a.jsonl"], "bytes", "is not an address that fsspec knows"),
        ([good], str(tmp_path / "none.json"), "cannot be read (No such file or directory); name a tokenizer.json"),
        ([good], str(tmp_path / "no.json"), "is not a tokenizer.json that the tokenizers library can read"),
        ([good], str(tmp_path / "dropout.json"), "has dropout"),
    ]
    for number, (sources, tokenizer, words) in enumerate(cases):
        with pytest.raises(DataError) as caught:
            prepare_sources(tmp_path / f"out-{number}", *sources, tokenizer=tokenizer)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"holds other files \(thesis\.doc\); choose another --out"):
        prepare_sources(tmp_path / "filled", good)
    with (tmp_path / "filled" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another rankscope prepare is writing to it"):
            prepare_sources(tmp_path / "filled", good)


def test_an_address_whose_client_has_errors_of_its_own_is_one_line() -> None:
    class WithoutCredentials(AbstractFileSystem):  # type: ignore[misc]
        protocol = "locked"

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            class NoCredentialsError(Exception):
                """Not an OSError, as those of botocore."""

            raise NoCredentialsError(f"no credentials for {path}")

        isdir = info

    fsspec.register_implementation("locked", WithoutCredentials)
    for address in ("locked://bucket/a.jsonl", "locked://bucket/*.jsonl"):
        with pytest.raises(DataError, match=r"^locked://.*: cannot be read \(no credentials"):
            find_sources([address])
