"""Prepare data: plan, write the missing shards, then the manifest.

    done = prepare(PrepareRequest(sources=["web/*.jsonl"], tokenizer="gpt2/tokenizer.json", out=Path("prepared/web")),
                   num_processes=2, on_progress=print)
    done.manifest.num_tokens

1. Find the sources and plan the shards; write `plan.json` and a copy of the tokenizer.
2. Write each shard that has no record yet, in any order, in several processes.
3. Write `manifest.json` from the records, and remove the records.

After an interruption the same call continues. A folder that was prepared from anything else is refused.
"""

from __future__ import annotations

import errno
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trainer.data.prepare.documents import ReadOptions
from trainer.data.prepare.plan import PreparePlan, difference, make_plan
from trainer.data.prepare.sources import find_sources
from trainer.data.prepare.tokenizer import BYTES, load_tokenizer
from trainer.data.prepare.workers import WorkerSetup, write_shards
from trainer.data.prepare.write_shard import (
    Advance,
    finished_shard,
    record_file,
    remove_scratch,
    write_file,
)
from trainer.data.token_folder import MANIFEST, PLAN, DataError, Manifest, Shard, SourceFile, read_manifest
from trainer.fsync import fsync_path

__all__ = ["PrepareRequest", "Prepared", "Progress", "prepare"]

_TOKENIZER = "tokenizer.json"
_REMEDY = "choose another --out, or delete the folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRequest:
    """Sources, tokenizer and output folder of a preparation."""

    sources: list[str]
    tokenizer: str
    out: Path
    end_token: str = ""
    options: ReadOptions = field(default_factory=ReadOptions)
    shard_bytes: int = 64 << 20


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of a preparation. Tokens and documents are counted from the start of this process."""

    num_shards: int
    shards_done: int
    text_bytes: int  # size of the text of all shards; an estimate if sources are compressed
    text_bytes_done: int
    num_documents: int = 0
    num_tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(1e-9, time.monotonic() - self.started_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    manifest: Manifest
    shards_reused: int  # number of shards that an earlier call had written
    already_complete: bool


def prepare(request: PrepareRequest, *, num_processes: int, on_progress: Callable[[Progress], None]) -> Prepared:
    """Prepare the data. Raises DataError, one line."""
    tokenizer = load_tokenizer(request.tokenizer, request.end_token)
    is_bytes = tokenizer.facts.name == BYTES
    options = ReadOptions(**{**asdict(request.options), "refuse_nul": is_bytes})
    sources = find_sources(request.sources)
    plan = make_plan(sources, tokenizer.facts, options, shard_bytes=request.shard_bytes)
    try:
        with _locked(request.out):
            already_complete = _claim_folder(request, plan, is_bytes)
            if already_complete:
                _remove_records(request.out, plan)
                return Prepared(
                    manifest=read_manifest(request.out),
                    shards_reused=len(plan.shards),
                    already_complete=already_complete,
                )
            setup = WorkerSetup(
                folder=request.out, plan=plan, tokenizer=BYTES if is_bytes else str(request.out / _TOKENIZER)
            )
            return _write_missing(setup, num_processes, on_progress)
    except OSError as error:
        remedy = "free space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder"
        raise DataError(
            f"{error.filename or request.out}: cannot be written ({error.strerror}); {remedy}, then run the same "
            "command: it continues"
        ) from None


def _claim_folder(request: PrepareRequest, plan: PreparePlan, is_bytes: bool) -> bool:
    """Check that the folder is empty or belongs to this plan. Returns True if the preparation is already complete."""
    folder, path = request.out, request.out / PLAN
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    is_complete = MANIFEST in names
    if PLAN in names:
        try:
            saved = json.loads(path.read_bytes())
        except ValueError:
            raise DataError(f"{path}: is damaged; {_REMEDY}") from None
        differs = difference(saved, plan.to_json())
        if differs and (is_complete or any(name.startswith("shard-") for name in names)):
            raise DataError(f"{folder}: was prepared from something else: {differs}; {_REMEDY}")
        if is_complete or saved == plan.to_json():
            return is_complete
    elif others := [name for name in names if name != _TOKENIZER]:
        raise DataError(f"{folder}: holds other files ({', '.join(others[:5])}); choose another --out")
    if not is_bytes:
        tokenizer_path = Path(request.tokenizer).expanduser()
        write_file(
            folder / _TOKENIZER,
            (tokenizer_path / _TOKENIZER if tokenizer_path.is_dir() else tokenizer_path).read_bytes(),
        )
    write_file(path, json.dumps(plan.to_json(), indent=1).encode())
    fsync_path(folder)
    return False


def _write_missing(setup: WorkerSetup, num_processes: int, on_progress: Callable[[Progress], None]) -> Prepared:
    folder, plan = setup.folder, setup.plan
    remove_scratch(folder)
    found = {planned.number: finished_shard(folder, planned, plan.tokenizer.dtype) for planned in plan.shards}
    shards: dict[int, Shard] = {number: shard for number, shard in found.items() if shard is not None}
    missing = [planned for planned in plan.shards if planned.number not in shards]
    num_kept = len(shards)
    progress = Progress(
        num_shards=len(plan.shards),
        shards_done=num_kept,
        text_bytes=sum(planned.text_bytes for planned in plan.shards),
        text_bytes_done=sum(planned.text_bytes for planned in plan.shards if planned.number in shards),
    )

    def advance(step: Advance) -> None:
        progress.text_bytes_done += step.text_bytes
        progress.num_documents += step.num_documents
        progress.num_tokens += step.num_tokens
        on_progress(progress)

    def keep(shard: Shard) -> None:
        shards[shard.number] = shard
        progress.shards_done += 1
        on_progress(progress)

    on_progress(progress)
    write_shards(setup, missing, num_processes=num_processes, on_progress=advance, on_shard=keep)
    manifest = Manifest(
        dtype=plan.tokenizer.dtype,
        tokenizer=asdict(plan.tokenizer),
        options={**asdict(plan.options), "shard_bytes": plan.shard_bytes},
        sources=tuple(SourceFile(name=source.name, size_bytes=source.size_bytes) for source in plan.sources),
        shards=tuple(shards[number] for number in sorted(shards)),
    )
    if not manifest.num_documents:
        raise DataError(f"{plan.sources[0].name}: no source holds a document; check --field and --document")
    write_file(folder / MANIFEST, (json.dumps(manifest.to_json(), indent=1) + "\n").encode())
    fsync_path(folder)
    _remove_records(folder, plan)
    return Prepared(manifest=manifest, shards_reused=num_kept, already_complete=False)


def _remove_records(folder: Path, plan: PreparePlan) -> None:
    for planned in plan.shards:
        record_file(folder, planned.number).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder exclusively during the block, or until the process is killed. Raises DataError if another process
    holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{folder}: another rankscope prepare is writing to it; wait until it ends") from None
        yield
