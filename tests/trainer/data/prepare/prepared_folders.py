"""Small inputs for tests of prepared data: a tokenizer, documents, and a folder made of them.

folder = prepare_lines(tmp_path, ["first document", "second"], tokenizer=small_tokenizer(tmp_path))
documents_in(folder)                  # what the token files hold, decoded
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from trainer.data.prepare.documents import ReadOptions
from trainer.data.prepare.prepare import Prepared, PrepareRequest, prepare
from trainer.data.token_folder import read_manifest, shard_files

WORDS = ["rank", "step", "loss", "norm", "shard", "token", "mesh", "stage", "straggler", "ümlaut", "漢字", "\t", "tape"]


def documents(count: int, *, seed: int = 0, most_words: int = 40) -> list[str]:
    """Documents without line breaks; no two are equal."""
    random_ = random.Random(seed)
    return [
        " ".join([f"{seed}-{number}", *random_.choices(WORDS, k=random_.randint(0, most_words))])
        for number in range(count)
    ]


def small_tokenizer(folder: Path, **changes: object) -> str:
    """A byte-level BPE of 300 tokens as `tokenizer.json`; `changes` are merged into its top level."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(documents(50), trainer)
    path = folder / "small-tokenizer.json"
    path.write_text(json.dumps({**json.loads(made.to_str()), **changes}), encoding="utf-8")
    return str(path)


def prepare_sources(
    out: Path,
    *sources: Path | str,
    tokenizer: str = "bytes",
    num_processes: int = 1,
    shard_bytes: int = 1 << 20,
    options: ReadOptions | None = None,
) -> Prepared:
    request = PrepareRequest(
        sources=[str(source) for source in sources],
        tokenizer=tokenizer,
        out=out,
        options=options or ReadOptions(),
        shard_bytes=shard_bytes,
    )
    return prepare(request, num_processes=num_processes, on_progress=lambda progress: None)


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def prepare_lines(folder: Path, texts: list[str], *, tokenizer: str = "bytes", shard_bytes: int = 1 << 20) -> Path:
    """`folder`/prepared, made of a JSONL file with these texts."""
    folder.mkdir(exist_ok=True)
    source = write_jsonl(folder / "source.jsonl", texts)
    prepare_sources(folder / "prepared", source, tokenizer=tokenizer, shard_bytes=shard_bytes)
    return folder / "prepared"


def documents_in(folder: Path) -> list[str]:
    """Every document that the shards hold, in order, decoded; each must end with its end token and hold no other."""
    manifest = read_manifest(folder)
    end_id = manifest.tokenizer["end_id"]
    found = []
    for shard in manifest.shards:
        tokens_file, documents_file, _ = shard_files(folder, shard.number)
        tokens = np.fromfile(tokens_file, dtype=manifest.dtype)
        start = 0
        for end in np.fromfile(documents_file, dtype="<u8").tolist():
            document = tokens[start:end]
            assert document[-1] == end_id
            assert end_id not in document[:-1]
            found.append(_decoded(folder, document[:-1]))
            start = end
        assert start == len(tokens)
    return found


def _decoded(folder: Path, tokens: np.ndarray) -> str:
    if not (folder / "tokenizer.json").exists():
        return tokens.tobytes().decode()
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens.tolist(), skip_special_tokens=False))


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a prepared folder but the plan, which names the times of the sources, and the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("plan.json", ".lock")}
