"""Random damage to every kind of file of a run: each must be reported, or have no effect.

    python -m benchmarks.durability.damages                                # 500 damaged files, some ten minutes
    python -m benchmarks.durability.damages --damages 20 --seed 3

A real run of two ranks (a NaN, a rollback, checkpoints, a ledger) is copied, one file of the copy is damaged, and the
copy is read as a user would:

- tapes, events, names, the index of checksums, `run.json`, the store: `analyze` lists a problem or refuses the file, or
  the rows are those of the undamaged run, both in the existing and in a rebuilt store;
- the ledger, manifests and files of checkpoints: resuming reports the file, or reads what was written.

The list of problems is read from its source in `analyze`, without the analyses. For every twentieth damage, `analyze`
runs completely and must list the same files.

A damage is a flipped bit, a blank range, a truncated or removed file, appended bytes, or a range copied from elsewhere
in the file. All kinds of files are damaged equally often. Exit code 1 if a damage with an effect is not reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzers.run.records.file_problems import file_problems
from benchmarks.harness import argument_parser
from probes.guard.ledger import Ledger
from probes.tape.rundir import RunDir, RunError
from store import Store, StoreError
from trainer.checkpoint.disk_tier.manifest import MANIFEST_NAME, CheckpointError, read_manifest, verify_files
from watch.verdicts.diagnosed_run import diagnosed_run

SETTINGS = (
    "run.name=damages", "model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=4",
    "data.seq_len=32", "train.global_batch_size=4", "train.device=cpu", "train.steps=60", "checkpoint.interval=20",
    "checkpoint.memory_survives=false", "parallel.dp_replicate=2", "parallel.dp_shard=1",
)  # fmt: skip
HARMS = ("flip", "flip", "blank", "cut", "remove", "append", "move")
ANALYZE_EVERY = 20
LEDGERS = ("ledger.json", "ledger-copy.json")


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a run as a reader gets it: rows by table or checkpoints, and the reported problems."""

    values: Any
    reported: tuple[str, ...] = ()


def train(folder: Path) -> RunDir:
    """Train a run to its end."""
    settings = [part for text in (*SETTINGS, f"run.dir={folder}") for part in ("--set", text)]
    faults = ["--fault", "bad_batch@step=30,rank=1"]
    subprocess.run([sys.executable, "-m", "rankscope", "train", *settings, *faults], check=True)
    return RunDir.open(folder / "latest")


def records(run: RunDir, *, judged: bool = False) -> Content:
    """Read the parts of a run that `analyze` reads; with `judged`, run all of its analyses."""
    try:
        with contextlib.ExitStack() as opened:
            if judged:
                store, diagnosis = opened.enter_context(diagnosed_run(run, is_over=True))
                if error := diagnosis.run.get("error"):
                    print(f"facts of the run failed: {error}", flush=True)
                problems = diagnosis.run.get("file_problems", ())
            else:
                store = opened.enter_context(Store.open(run, include_newest=True))
                problems = file_problems(store)
            reported = tuple(f"{found['path']} {found['problem']}" for found in problems)
            return Content({"rows": _rows(store), "manifest": run.manifest()}, reported)
    except (StoreError, RunError) as error:
        return Content(None, (str(error),))


def _rows(store: Store) -> dict[str, Any]:
    tables = [name for name in store.tables() if not name.startswith("ingest")]
    select = " UNION ALL ".join(f"SELECT '{name}', count(*), sum(hash(t)) FROM {name} t" for name in tables)
    return {name: row for name, *row in store.rows(select)}


def checkpoints(run: RunDir) -> Content:
    """Read the parts of a run that `--resume` reads."""
    reported, found = [], {}
    ledger, problem = Ledger.load(run.checkpoints / LEDGERS[0])
    reported += [problem] if problem else []
    for folder in sorted(run.checkpoints.glob("step-*")):
        try:
            manifest = read_manifest(folder)
            verify_files(folder, manifest, manifest["files"])
            found[folder.name] = manifest
        except CheckpointError as error:
            reported.append(str(error))
    return Content({"ledger": ledger.to_json(), "checkpoints": found}, tuple(reported))


def kinds_of_files(run: RunDir) -> dict[str, list[Path]]:
    """{kind: paths} of the files that are not empty."""
    tapes = [path for path in sorted(run.tapes.rglob("*")) if path.is_file() and path.stat().st_size]
    saved = [path for path in sorted(run.checkpoints.rglob("*")) if path.is_file()]
    found = {
        "tape": [path for path in tapes if path.suffix == ".tape"],
        "events": [path for path in tapes if path.name == "events.jsonl"],
        "names": [path for path in tapes if path.name.endswith("names.jsonl")],
        "index": [path for path in tapes if path.name == "segments.jsonl"],
        "store": run.stores(),
        "run.json": [run.path / "run.json"],
        "ledger": [path for path in saved if path.name in LEDGERS],
        "manifest": [path for path in saved if path.name == MANIFEST_NAME],
        "checkpoint": [path for path in saved if path.name not in (MANIFEST_NAME, *LEDGERS)],
    }
    missing = [kind for kind, paths in found.items() if not paths]
    if missing:
        raise SystemExit(f"the run has no {', '.join(missing)}")
    return found


def damage(path: Path, harm: str, dice: random.Random) -> None:
    """Damage the used part of a file."""
    if harm == "remove":
        path.unlink()
        return
    blob = bytearray(path.read_bytes())
    used = len(blob.rstrip(b"\0")) or len(blob)
    if harm == "append":
        blob[used:used] = dice.randbytes(dice.choice((1, 64, 4096)))
    elif harm == "cut":
        del blob[dice.randrange(used) :]
    else:
        at, length = dice.randrange(used), dice.choice((1, 8, 64, 4096))
        if harm == "flip":
            blob[at] ^= 1 << dice.randrange(8)
        elif harm == "blank":
            blob[at : at + length] = bytes(len(blob[at : at + length]))
        else:
            source = dice.randrange(used)
            part = bytes(blob[source : source + length])[: len(blob) - at]
            blob[at : at + len(part)] = part
    path.write_bytes(blob)


def judge(references: dict[str, Content], copy: RunDir, path: Path) -> str:
    """Return `reported`, `no effect`, or a description of the damage that was not reported."""
    is_checkpoint = copy.checkpoints in path.parents
    read: Callable[[RunDir], Content] = checkpoints if is_checkpoint else records
    reference = references["checkpoints" if is_checkpoint else "records"]
    content = read(copy)
    if content.reported:
        return "reported"
    if content.values != reference.values:
        return f"other content: {_differences(reference.values, content.values)}"
    if is_checkpoint or path in copy.stores():
        return "no effect"
    for store in copy.stores():
        store.unlink()
    content = read(copy)
    if content.reported:
        return "reported"
    return "no effect" if content.values == reference.values else "other content of a rebuilt store"


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> str:
    return ", ".join(
        f"{part}.{name}"
        for part in expected
        for name in expected[part]
        if expected[part][name] != found[part].get(name)
    )


def copied(whole: RunDir, to: Path, damaged: Path) -> tuple[RunDir, Path]:
    """A copy of the run, and the file to damage in it; files that are never written are hard links."""
    copy = RunDir(to)
    shutil.copytree(whole.path, copy.path, copy_function=os.link, symlinks=True)
    path = copy.path / damaged.relative_to(whole.path)
    for writable in {path, *copy.stores(), *copy.event_files()}:
        if writable.exists():
            original = whole.path / writable.relative_to(copy.path)
            writable.unlink()
            shutil.copy2(original, writable)
    return copy, path


def main() -> None:
    """Print a row per kind of file; exit with code 1 if a damage was not reported."""
    parser = argument_parser(__doc__)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice, results, unreported = random.Random(options.seed), Counter[tuple[str, str]](), 0
    with tempfile.TemporaryDirectory() as name:
        whole = train(Path(name))
        references = {"records": records(whole), "checkpoints": checkpoints(whole)}
        for reference in references.values():
            if reference.reported:
                raise SystemExit(f"the undamaged run has problems: {'; '.join(reference.reported)}")
        files = kinds_of_files(whole)
        for number in range(options.damages):
            kind = list(files)[number % len(files)]
            chosen, harm = dice.choice(files[kind]), dice.choice(HARMS)
            copy, path = copied(whole, Path(name) / "copy", chosen)
            damage(path, harm, dice)
            is_same = path.exists() and path.read_bytes() == chosen.read_bytes()
            result = "no effect" if is_same else judge(references, copy, path)
            if number % ANALYZE_EVERY == 0 and copy.checkpoints not in path.parents:
                brief, judged = records(copy), records(copy, judged=True)
                if path in copy.stores():  # damage that only a query finds: the store is set aside, rebuilt and listed
                    is_listed = not brief.reported or any(path.name in text for text in judged.reported)
                else:
                    is_listed = set(brief.reported) == set(judged.reported)
                if not is_listed:
                    result = f"analyze lists {judged.reported} instead of {brief.reported}"
            if result not in ("reported", "no effect"):
                unreported += 1
                print(f"#{number} {harm} {path.relative_to(copy.path)}: {result}", flush=True)
                result = "UNREPORTED"
            results[kind, result] += 1
            if number % 50 == 49:
                print(f"{number + 1} damages, {unreported} unreported", flush=True)
            shutil.rmtree(copy.path)
    for kind in files:
        counts = {result: results[kind, result] for result in ("reported", "no effect", "UNREPORTED")}
        print(f"{kind:12} {json.dumps(counts)}")
    print(f"{options.damages} damages, seed {options.seed}: {unreported} unreported; load {os.getloadavg()[0]:.1f}")
    sys.exit(unreported > 0)


if __name__ == "__main__":
    main()
