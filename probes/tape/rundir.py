"""Layout of a run's folder: all file names are defined here.

run = RunDir.create(Path("runs"), name="demo", manifest={...})
run = RunDir.open(Path("runs/latest"))
run.rank_dir(attempt=0, rank=3)          # tapes/attempt-0/rank-00003
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files.safe_open import file_problem, folder_problem, read_plain, write_private
from .format.schema import SCHEMA_VERSION
from .no_run import NAME_ONE, no_run_at, what_instead
from .redaction.secrets import with_secrets, without_secrets

__all__ = ["NODE_RANK", "RunDir", "RunError", "make_private"]

NODE_RANK = -1
"""The `rank` of what a node process (watch, launcher) writes."""
MAX_MANIFEST_BYTES = 16 << 20
SECRETS = "secrets.json"
"""File with the settings that are redacted in `run.json`. It is never collected, shared or exported."""
_UNKNOWN = "what was configured is not known"
NO_MANIFEST = f"is damaged: {_UNKNOWN}"
MISSING_MANIFEST = f"is missing: {_UNKNOWN}"
CREATED = "created_wall_ns"
"""Fact of `run.json` that every claim of an attempt repeats."""
FOREIGN = f"is that of another run: {_UNKNOWN}"
ALTERED = "was altered: its digest does not match"
_DIGEST = "digest"
"""Key in `run.json` of the digest of all its other content."""
_DIGEST_TEXT = re.compile(r"[0-9a-f]{32}")


class RunError(ValueError):
    """A run's folder is missing or unusable; one line with the problem, the path and what to do."""


PRIVATE = 0o700
"""Mode of a run's folder, which holds the configuration, error texts and samples of the data."""


class RunDir:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs_dir: Path, *, name: str, manifest: dict[str, Any]) -> RunDir:
        """Make a new run `<name>-<date>-<time>`, write its manifest and point `latest` at it. Raises RunError."""
        stem = f"{_safe(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
            path = runs_dir / (stem + suffix)
            try:
                path.mkdir(parents=True, mode=PRIVATE)
            except FileExistsError:
                continue
            except (OSError, ValueError) as error:  # ValueError: a name with a null byte
                reason = f"cannot make the run's folder {path}: {getattr(error, 'strerror', error)}"
                raise RunError(f"{reason}; choose another run.dir") from None
            break
        run = cls(path)
        run._make_folders()
        run.begin_manifest(manifest)
        _point_latest(runs_dir, path.name)
        return run

    @classmethod
    def join(cls, runs_dir: Path, job: str, name: str) -> tuple[RunDir, bool]:
        """Open the run of a launch, created under `name` by its first rank. Returns (run, True if this rank is first).

        That rank must write the manifest. Raises OSError if the folder is not writable.
        """
        launches = runs_dir / ".launches"
        launches.mkdir(parents=True, exist_ok=True)
        stem = _safe(name)
        for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
            if not os.path.lexists(runs_dir / (stem + suffix)):
                break
        try:
            (launches / job).symlink_to(Path("..") / (stem + suffix))
        except FileExistsError:
            return cls.adopt(runs_dir / Path(os.readlink(launches / job)).name)[0], False
        run, _ = cls.adopt(runs_dir / (stem + suffix))
        _point_latest(runs_dir, run.path.name)
        return run, True

    @classmethod
    def adopt(cls, path: Path) -> tuple[RunDir, bool]:
        """Use exactly this folder. Returns (run, True if it is new and needs a manifest).

        Raises RunError if the folder holds something else, OSError if it cannot be created.
        """
        is_new = cls.is_new(path)
        if is_new:
            make_private(path)
        run = cls(path.resolve())
        run._make_folders()
        return run, is_new

    @classmethod
    def is_new(cls, path: Path) -> bool:
        """True if a run can be made here, False if one exists here. Raises RunError for anything else."""
        if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
            return True
        if not cls.is_run(path):
            raise RunError(f"{path} holds something that is not a run: name a folder that is new or empty")
        return False

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run. Raises RunError with one line if there is none or it is from a newer rankscope."""
        if not path.exists():
            raise RunError(no_run_at(path))
        if not path.is_dir():
            raise RunError(f"{path} is a file, not a run's folder: {NAME_ONE}; `rankscope analyze` reads files")
        run = cls(path.resolve())
        if not cls.is_run(path):
            raise RunError(f"{path} {what_instead(path, [entry for entry in path.glob('*') if cls.is_run(entry)])}")
        version = run.manifest().get("schema_version", SCHEMA_VERSION)
        if isinstance(version, int) and version > SCHEMA_VERSION:
            known = f"this rankscope reads up to {SCHEMA_VERSION}"
            raise RunError(f"{path} was written with schema {version}, {known}: update rankscope")
        return run

    @classmethod
    def is_run(cls, path: Path) -> bool:
        """Return True if the folder holds a manifest, tapes or a store."""
        run = cls(path)
        try:
            return os.path.lexists(path / "run.json") or run.tapes.is_dir() or bool(run.stores())
        except OSError:  # no permission to read the folder
            return False

    @property
    def run_id(self) -> str:
        """The run's name on disk."""
        return self.path.name

    @property
    def tapes(self) -> Path:
        """Folder of all tapes."""
        return self.path / "tapes"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints on disk."""
        return self.path / "checkpoints"

    @property
    def stacks(self) -> Path:
        """Python stacks, one file per rank, taken when a run hangs."""
        return self.path / "stacks"

    @property
    def reports(self) -> Path:
        """Folder of the reports that `analyze` writes on request."""
        return self.path / "reports"

    def store(self, node_rank: int = 0) -> Path:
        """The store of a node: `telemetry.duckdb` on the first, `telemetry-node<k>.duckdb` on the others."""
        return self.path / ("telemetry.duckdb" if node_rank == 0 else f"telemetry-node{node_rank}.duckdb")

    def stores(self) -> list[Path]:
        """Paths of all existing stores, the first node's first."""
        return sorted(self.path.glob("telemetry*.duckdb"), key=lambda path: (len(path.name), path.name))

    def rank_dir(self, attempt: int, rank: int) -> Path:
        """Folder of one rank's tapes in one attempt."""
        return self.tapes / f"attempt-{attempt}" / f"rank-{rank:05d}"

    def node_dir(self, node_rank: int) -> Path:
        """Folder of a node process's tapes and events (health, findings, restarts), over all attempts."""
        return self.tapes / f"node-{node_rank:05d}"

    def rank_dirs(self, rank: int | None = None) -> Iterator[tuple[int, int, Path]]:
        """Yield (attempt, rank, folder) of every rank that ever wrote, or of one rank, in order."""
        found = []
        for attempt in self._folders("attempt-*"):
            for path in attempt.glob("rank-*" if rank is None else f"rank-{rank:05d}"):
                match = re.fullmatch(r"attempt-(\d{1,9})/rank-(\d{1,9})", f"{attempt.name}/{path.name}")
                if match and path.is_dir() and not path.is_symlink():
                    found.append((int(match[1]), int(match[2]), path))
        yield from sorted(found)

    def node_dirs(self) -> Iterator[tuple[int, Path]]:
        """Yield (node rank, folder) of every node process that ever wrote."""
        for path in self._folders("node-*"):
            match = re.fullmatch(r"node-(\d{1,9})", path.name)
            if match:
                yield int(match[1]), path

    def event_files(self) -> Iterator[Path]:
        """Paths of the event files of all node processes and ranks; they need not exist."""
        for folder in [path for _, path in self.node_dirs()] + [path for _, _, path in self.rank_dirs()]:
            yield folder / "events.jsonl"

    def _folders(self, pattern: str) -> list[Path]:
        """Folders with the ranks' record files. Links are left out, because they may lead out of the run."""
        if folder_problem(self.tapes):
            return []
        return sorted(path for path in self.tapes.glob(pattern) if path.is_dir() and not path.is_symlink())

    def problems(self) -> dict[str, str]:
        """Return {path in the run: problem} for unsafe files, which are not opened, and a missing or bad `run.json`."""
        found = {"run.json": file_problem(self.path / "run.json"), "tapes": folder_problem(self.tapes)}
        if not found["run.json"]:
            found["run.json"] = self._manifest_problem()
        places = [self.tapes, *self._folders("attempt-*")] if not found["tapes"] else []
        for place in places:
            for path in place.glob("*-*"):
                found[path.relative_to(self.path).as_posix()] = folder_problem(path)
        for _, _, folder in self.rank_dirs():
            for name in ("events.jsonl", "names.jsonl", "nccl_names.jsonl"):
                found[(folder / name).relative_to(self.path).as_posix()] = file_problem(folder / name)
        return {path: problem for path, problem in sorted(found.items()) if problem}

    def _manifest_problem(self) -> str:
        """Problem with the content of `run.json`; empty if there is none, or if an older version wrote it without a
        digest."""
        try:
            public = self._load("run.json")
        except FileNotFoundError:
            return MISSING_MANIFEST
        except OSError as error:
            return f"cannot be read ({error.strerror}): {_UNKNOWN}"
        except (ValueError, RecursionError):
            return NO_MANIFEST
        if self._is_foreign(public):
            return FOREIGN
        if _DIGEST in public:
            return "" if public[_DIGEST] == _digest(public) else ALTERED
        has_renamed_digest = any(isinstance(value, str) and _DIGEST_TEXT.fullmatch(value) for value in public.values())
        return ALTERED if has_renamed_digest else ""

    def _is_foreign(self, public: Mapping[str, Any]) -> bool:
        """Return True if the attempts of this run were claimed under another `run.json`."""
        claims = [self._read(path.relative_to(self.path).as_posix()) for path in self.path.glob("attempts/*.json")]
        created = {claimed[CREATED] for claimed in claims if isinstance(claimed.get(CREATED), int)}
        return bool(created) and public.get(CREATED, 0) not in {0, *created}

    def _make_folders(self) -> None:
        for folder in (self.tapes, self.checkpoints, self.stacks, self.reports):
            folder.mkdir(exist_ok=True)

    def manifest(self) -> dict[str, Any]:
        """`run.json`; an empty dict if it is missing, unreadable or of another run: a dead run must still be readable.

        `problems` says why it is empty. `run_id` is the present name of the folder, even if the folder was copied or
        renamed.
        """
        found = {key: value for key, value in self._read("run.json").items() if key != _DIGEST}
        if self._is_foreign(found):
            return {}
        return found and found | {"run_id": self.run_id}

    def created_ns(self) -> int | None:
        """When `run.json` was created (epoch nanoseconds), which identifies it; None if unknown."""
        found = self._read("run.json").get(CREATED)
        return found if isinstance(found, int) else None

    def recorded_id(self) -> str:
        """The run's name when it started, from `run.json`; the folder's name if none is recorded there."""
        return str(self._read("run.json").get("run_id", self.run_id))

    def private_manifest(self) -> dict[str, Any]:
        """`run.json` including secret settings: for use, never for display."""
        return with_secrets(self.manifest(), self._secrets())

    def _secrets(self) -> dict[str, Any]:
        return self._read(SECRETS)

    def _read(self, name: str) -> dict[str, Any]:
        """A file of the run as JSON; empty if it is missing, unreadable or not an object."""
        try:
            return self._load(name)
        except (OSError, ValueError, RecursionError):
            return {}

    def _load(self, name: str) -> dict[str, Any]:
        """A file of the run as JSON. Raises OSError, ValueError, RecursionError."""
        loaded = json.loads(read_plain(self.path / name, MAX_MANIFEST_BYTES))
        if not isinstance(loaded, dict) or not loaded:
            raise ValueError(f"{name} is not an object, or is empty")
        return loaded

    def begin_manifest(self, manifest: dict[str, Any]) -> None:
        """Write `run.json` of a new run: `manifest` plus the facts that every run records about itself."""
        own = {"run_id": self.run_id, "schema_version": SCHEMA_VERSION, CREATED: time.time_ns()}
        self.write_manifest(own | manifest)

    def add_to_manifest(self, facts: dict[str, Any]) -> None:
        """Merge into `run.json`. Raises OSError if it cannot be read, since replacing it would lose its content."""
        try:
            before = self._load("run.json")
        except (FileNotFoundError, ValueError, RecursionError):
            before = {}  # missing or damaged, so nothing can be lost
        before.pop(_DIGEST, None)
        self.write_manifest(before | facts)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace `run.json` in one step. Settings that are secrets go into their own file."""
        before = self._secrets()
        public, secrets = without_secrets(manifest, before)
        if secrets != before:
            self._write_json(SECRETS, secrets)
        # the digest must be that of the content as it is read back
        public = json.loads(json.dumps(public, default=str))
        self._write_json("run.json", public | {_DIGEST: _digest(public)})

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        """Replace a file of the run; only its owner can read it."""
        write_private(self.path / name, json.dumps(content, indent=2, default=str) + "\n")


def make_private(path: Path) -> None:
    """Create the folder of a new run, or make an existing empty one private. Raises OSError if it cannot be created.

    Folders of other users and file systems without modes are left as they are.
    """
    path.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    with contextlib.suppress(OSError):
        if path.stat().st_uid == os.geteuid():
            path.chmod(PRIVATE)


def _digest(content: Mapping[str, Any]) -> str:
    """Digest of the manifest's content except the digest itself."""
    rest = {key: value for key, value in content.items() if key != _DIGEST}
    return hashlib.blake2b(json.dumps(rest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _point_latest(runs_dir: Path, name: str) -> None:
    fresh = runs_dir / f".latest-{os.getpid()}"
    fresh.symlink_to(name)
    fresh.replace(runs_dir / "latest")


def _safe(name: str) -> str:
    """A run's name as a file name: letters, digits, dot, dash, underscore."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "run"
