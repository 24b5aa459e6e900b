"""Tokens per second of `rankscope prepare` against the tokenizers library alone, on the same text.

    python -m benchmarks.scale.prepare                                   # 200 MB of generated text, three rounds
    python -m benchmarks.scale.prepare --mb 1000 --kills 5               # 1 GB, then again under SIGKILLs
    python -m benchmarks.scale.prepare --mb 5 --rounds 1 --processes 2
    python -m benchmarks.scale.prepare --tokenizer gpt2/tokenizer.json --source 'web/*.jsonl'

Each round runs both, one after the other, so that other load affects both. The library reads the same JSONL,
encodes it with `encode_batch_fast` on as many threads as `prepare` has processes, and discards the tokens; `prepare`
also starts its processes, writes, hashes and syncs. Both must yield the same number of tokens. Generated words have
Zipf frequencies; without --tokenizer a byte-level BPE of 8,000 tokens is trained on a part of the text.

With `--kills` everything is prepared again in a process that receives that many SIGKILLs at random times and is
restarted after each. The files must be byte-identical to those of an undisturbed run: no document lost or duplicated.
"""

from __future__ import annotations

import glob
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.harness import argument_parser
from trainer.data.prepare.prepare import PrepareRequest, prepare

__all__ = ["main"]

BATCH = 1024
DOCUMENT_WORDS = 400
FILES = 8


def generate(folder: Path, num_bytes: int) -> list[str]:
    """Write JSONL files with about `num_bytes` of text in total."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    words = ["".join(rng.choice(letters, length)) for length in rng.integers(2, 11, 30_000)]
    weights = 1 / np.arange(1, len(words) + 1)
    weights /= weights.sum()
    paths = []
    for number in range(FILES):
        path = folder / f"generated-{number}.jsonl"
        written = 0
        with path.open("w", encoding="utf-8") as file:
            while written < num_bytes / FILES:
                drawn = rng.choice(len(words), (200, DOCUMENT_WORDS), p=weights)
                for row in drawn:
                    text = " ".join(words[word] for word in row)
                    file.write(json.dumps({"text": text}) + "\n")
                    written += len(text)
        paths.append(str(path))
    return paths


def train_tokenizer(sources: list[str], path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for batch in islice(_texts(sources[:1]), 4) for text in batch)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return str(path)


def _texts(sources: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for source in sources:
        with open(source, encoding="utf-8") as file:
            for line in file:
                batch.append(json.loads(line)["text"])
                if len(batch) == BATCH:
                    yield batch
                    batch = []
    if batch:
        yield batch


def encode_with_library(sources: list[str], tokenizer: str) -> int:
    """Number of tokens of all documents, without end tokens."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    loaded.encode_special_tokens = True
    return sum(
        len(encoding)
        for batch in _texts(sources)
        for encoding in loaded.encode_batch_fast(batch, add_special_tokens=False)
    )


def _time_library(sources: list[str], tokenizer: str, num_threads: int) -> tuple[int, float]:
    """Return (tokens, seconds). Runs in a separate process, since the library fixes its number of threads at its start;
    start-up is not timed.
    """
    program = (
        "import json, sys, time\nfrom benchmarks.scale.prepare import encode_with_library\n"
        "began = time.perf_counter()\ncount = encode_with_library(json.loads(sys.argv[1]), sys.argv[2])\n"
        "print(count, time.perf_counter() - began)"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-c", program, json.dumps(sources), tokenizer]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, seconds = done.stdout.split()
    return int(count), float(seconds)


def _prepare(sources: list[str], tokenizer: str, num_processes: int, out: Path) -> tuple[int, int]:
    """(tokens, documents)."""
    request = PrepareRequest(
        sources=sources, tokenizer=tokenizer, out=out, shard_bytes=_shard_bytes(sources, num_processes)
    )
    manifest = prepare(request, num_processes=num_processes, on_progress=lambda progress: None).manifest
    return manifest.num_tokens, manifest.num_documents


def _time_prepare(sources: list[str], tokenizer: str, num_processes: int) -> tuple[int, int, float]:
    """(tokens, documents, seconds)."""
    with tempfile.TemporaryDirectory(prefix="prepare-") as name:
        began = time.perf_counter()
        num_tokens, num_documents = _prepare(sources, tokenizer, num_processes, Path(name) / "out")
        return num_tokens, num_documents, time.perf_counter() - began


_KILLED = """
import json, sys
from pathlib import Path
from benchmarks.scale.prepare import _prepare

if __name__ == "__main__":
    sources, tokenizer, processes, out = json.loads(sys.argv[1])
    _prepare(sources, tokenizer, processes, Path(out))
"""
"""Written to a file, because worker processes import the main module again."""


def _kill_and_compare(sources: list[str], tokenizer: str, num_processes: int, kills: int, folder: Path) -> None:
    """Prepare in a process that is killed `kills` times. Raises SystemExit if its files differ from those of an
    undisturbed process.
    """
    expected, out, program = folder / "expected", folder / "killed", folder / "killed.py"
    began = time.perf_counter()
    num_tokens, num_documents = _prepare(sources, tokenizer, num_processes, expected)
    duration_s, rng = time.perf_counter() - began, random.Random(0)
    program.write_text(_KILLED)
    command = [sys.executable, str(program), json.dumps([sources, tokenizer, num_processes, str(out)])]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    num_kills = 0
    while num_kills < kills:
        process = subprocess.Popen(command, env=environment)
        try:
            process.wait(duration_s / kills * rng.uniform(0.3, 1.5))
            break  # finished before the kill
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            num_kills += 1
            print(f"kill {num_kills}: {len(list(out.glob('shard-*.json')))} shards are written", flush=True)
    subprocess.run(command, env=environment, check=True)
    names = sorted(path.name for path in expected.iterdir() if path.name != "plan.json")
    different = [name for name in names if (expected / name).read_bytes() != (out / name).read_bytes()]
    if different or sorted(path.name for path in out.iterdir() if path.name != "plan.json") != names:
        raise SystemExit(f"{num_kills} kills changed the result: {different or 'other files'}")
    print(f"{num_kills} kills: {num_documents:,} documents, {num_tokens:,} tokens, all files identical", flush=True)


def _shard_bytes(sources: list[str], num_processes: int) -> int:
    """Size at which all processes stay busy to the end; at most the default."""
    total = sum(os.path.getsize(source) for source in sources)
    return min(64 << 20, max(1 << 20, total // (8 * num_processes)))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--mb", type=float, default=200, help="MB of generated text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=0, help="prepare again under this many SIGKILLs")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokenizer", default="", help="tokenizer.json; default: train one")
    parser.add_argument("--source", default="", help="glob of JSONL files with a field `text`; default: generate them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prepare-text-") as name:
        folder = Path(name)
        sources = sorted(glob.glob(options.source)) if options.source else generate(folder, int(options.mb * 1e6))
        tokenizer = options.tokenizer or train_tokenizer(sources, folder / "tokenizer.json")
        ratios = []
        print(f"{sum(os.path.getsize(source) for source in sources) / 1e6:,.0f} MB of JSONL", flush=True)
        print(f"{'round':>5}  {'library, tokens/s':>18}  {'prepare, tokens/s':>18}  {'ratio':>6}", flush=True)
        for number in range(options.rounds):
            library_tokens, library_s = _time_library(sources, tokenizer, options.processes)
            num_tokens, num_documents, prepare_s = _time_prepare(sources, tokenizer, options.processes)
            num_content = num_tokens - num_documents  # without an end token per document
            if library_tokens != num_content:
                raise SystemExit(f"prepare made {num_content:,} tokens, the library {library_tokens:,}")
            rates = library_tokens / library_s, num_tokens / prepare_s
            ratios.append(rates[1] / rates[0])
            print(f"{number:>5}  {rates[0]:>18,.0f}  {rates[1]:>18,.0f}  {ratios[-1]:>6.2f}", flush=True)
        print(
            f"{num_tokens:,} tokens of {num_documents:,} documents; median ratio {statistics.median(ratios):.2f}",
            flush=True,
        )
        if options.kills:
            _kill_and_compare(sources, tokenizer, options.processes, options.kills, folder)


if __name__ == "__main__":
    main()
