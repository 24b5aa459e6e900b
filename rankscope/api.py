"""Runs in Python: verdict, findings, records and comparisons, of live and finished runs.

    import rankscope

    run = rankscope.open_run("runs/latest")
    run                                  # the verdict; in a notebook also the time account
    run.findings                         # what is wrong, worst first
    run.sql("SELECT rank, median(duration_ns) FROM steps GROUP BY rank").to_pandas()
    rankscope.open_files("logs/").verdict      # of a job that Rankscope did not record

Plug-ins import from here, too: Analysis, Drawing, Finding, Kind, Scope, Source, floats, ints, lacking, typed.

For notebooks and services; a training process uses `rankscope.attach`. This interface changes only with a new minor
version, announced in CHANGELOG.md one version ahead (docs/api.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import rankscope.claim  # noqa: F401 (before the imports below)
from rankscope.analyzers.account.by_step import AccountByStep
from rankscope.analyzers.analysis import Analysis
from rankscope.analyzers.compare.loss_change import LossChange
from rankscope.analyzers.compare.two_runs import Comparison
from rankscope.analyzers.diagnose import Diagnosis
from rankscope.analyzers.figures.drawing.titled_figure import Drawing
from rankscope.analyzers.finding import Finding
from rankscope.analyzers.kinds import Kind
from rankscope.analyzers.run.live.state import RunState
from rankscope.analyzers.scope import Scope
from rankscope.analyzers.source import TypedSource as Source
from rankscope.analyzers.source import floats, ints, lacking, typed
from rankscope.analyzers.stragglers.throughput import Change
from rankscope.probes.tape.rundir import RunDir, RunError
from rankscope.query_result import QueryResult
from rankscope.store.database import StoreError
from rankscope.store.published.address import AddressError
from rankscope.store.readers.untrusted.external_files import SourceError

__all__ = [
    "AccountByStep", "AddressError", "Analysis", "Change", "Comparison", "Diagnosis", "Drawing", "Evidence", "Finding",
    "Kind", "LossChange", "QueryResult", "Run", "RunError", "RunState", "Scope", "Source", "SourceError", "StoreError",
    "floats", "ints", "lacking", "open", "open_files", "open_run", "typed",
]  # fmt: skip


def open(path: str | PathLike[str], *more: str | PathLike[str]) -> Run | Evidence:
    """Open whatever is at a path: a run (`open_run`), or the files of any job (`open_files`).

    Raises RunError, AddressError or SourceError (all ValueError); the one-line message names the problem and the
    remedy.
    """
    from store.open import classify

    if not more and classify(Path(path)).kind in ("address", "run", "runs", "missing"):
        return open_run(path)
    return open_files(path, *more)


def open_run(path: str | PathLike[str]) -> Run:
    """Open a run, the newest run of a folder of runs, or the address of either (s3://bucket/prefix/RUN,
    s3://bucket/prefix).

    Raises RunError or AddressError (both ValueError); the one-line message names the problem and the remedy.
    """
    from store.open import classify

    found = classify(Path(path))
    return _published(found.address) if found.kind == "address" else Run(RunDir.open(found.run))


def open_files(path: str | PathLike[str], *more: str | PathLike[str]) -> Evidence:
    """Open files of a job that Rankscope did not record: logs, dumps, traces, archives, and folders of them. They are
    read on first use.
    """
    return Evidence([Path(path), *map(Path, more)])


class _Diagnosed:
    """Base of `Run` and `Evidence`, which both have a diagnosis."""

    def diagnose(self) -> Diagnosis:
        """Diagnose the records so far. Takes about a second, longer for long runs."""
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        """The diagnosis in one to three sentences: what went wrong, on which rank."""
        return self.diagnose().verdict

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings that name something wrong, certain or suspected, worst first."""
        return self.diagnose().fired

    def report(self) -> dict[str, object]:
        """Return what `rankscope analyze --format json` prints (docs/report.schema.json)."""
        from analyzers.report.json import to_json

        return to_json(self.diagnose())

    def _repr_markdown_(self) -> str:
        return self.diagnose()._repr_markdown_()


class Run(_Diagnosed):
    """One recorded run. Each call reads the records that exist at that time."""

    def __init__(self, folder: RunDir, refresh: Callable[[], object] | None = None) -> None:
        self._run_folder, self._refresh = folder, refresh
        self._known: tuple[object, Diagnosis] | None = None

    @property
    def _folder(self) -> RunDir:
        """The run's folder, which is brought up to date if it is the copy of a published run."""
        if self._refresh is not None:
            self._refresh()
        return self._run_folder

    @property
    def path(self) -> Path:
        """Folder of the run, or of the local copy of a published run."""
        return self._folder.path

    @property
    def run_id(self) -> str:
        """Name of the run on disk."""
        return self._folder.run_id

    @property
    def manifest(self) -> Mapping[str, object]:
        """Configuration, mesh, versions and command, as written when it started."""
        return self._folder.manifest()

    @property
    def state(self) -> RunState:
        """One word (training, stalled, finished, died, ...), the reason, and the time of the newest record."""
        from analyzers.run.live.folder_state import folder_state
        from analyzers.run.policy import stall_policy
        from store import Store

        with Store.open(self._folder) as store:
            policy = stall_policy(self._folder.manifest())
            return folder_state(self._folder, store, policy, now_ns=time.time_ns())

    def diagnose(self) -> Diagnosis:
        """Diagnose the records so far; the result is cached until records are added.

        The result equals the result of `rankscope analyze`. While the run is ending, this waits some seconds for the
        last records."""
        from analyzers.account.long_run import MEMORY_BYTES
        from store import is_watched
        from watch.verdicts.diagnosed_run import diagnosed_run
        from watch.verdicts.run_phase import run_phase

        folder = self._folder
        is_over = run_phase(folder).word == "ended" and not is_watched(folder.stores())
        if self._known is not None and is_over and self._known[0] == self._version():
            return self._known[1]
        with diagnosed_run(folder, memory_bytes=MEMORY_BYTES, spills=True) as (_, diagnosis):
            pass
        self._known = (self._version(), diagnosis)
        return diagnosis

    def account(self, *, first_step: int = 0, last_step: int | None = None) -> AccountByStep:
        """Time account of each rank in each step: nanoseconds by class, NaN if not measured."""
        from analyzers.account.by_step import account_by_step
        from store import Store

        with Store.open(self._folder) as store:
            return account_by_step(store, first_step=first_step, last_step=last_step)

    def sql(
        self,
        statement: str,
        parameters: Sequence[object] | Mapping[str, object] | None = None,
        *,
        max_rows: int = 1_000_000,
        limit_s: float = 300.0,
    ) -> QueryResult:
        """Run one read-only statement on the run's tables (docs/schema.md). `parameters` replace its `?` or `$name`.

        Duplicate column names get a suffix: `ms`, `ms_2`. Raises StoreError (a ValueError).
        """
        from store import Store

        with Store.open(self._folder, spills=True) as store:
            answer = store.typed(statement, parameters, max_rows=max_rows, limit_s=limit_s)
        if answer.is_cut:
            raise StoreError(f"more than {max_rows} rows: aggregate, or set max_rows")
        return QueryResult(answer.names, answer.rows, answer.types)

    def steps(self, *columns: str) -> QueryResult:
        """Return rows of `steps` in order of attempt, rank and step, with all columns or only the named ones."""
        keys = ("attempt", "rank", "step")
        names = ", ".join(f'"{name.replace(chr(34), "")}"' for name in dict.fromkeys((*keys, *columns)))
        return self.sql(f"SELECT {names if columns else '*'} FROM steps WHERE rank >= 0 ORDER BY attempt, rank, step")

    def events(self, kind: str = "") -> list[dict[str, object]]:
        """Events in order of time: rollbacks, restarts, checkpoints, injected faults, findings."""
        import json

        result = self.sql("SELECT wall_ns, attempt, rank, step, kind, detail FROM events ORDER BY wall_ns")
        rows = [row | {"detail": json.loads(str(row["detail"] or "{}"))} for row in result.to_dicts()]
        return [row for row in rows if kind in ("", row["kind"])]

    @property
    def stacks(self) -> dict[str, str]:
        """Stacks of ranks that hung or were slow, by file name, with secrets redacted; empty if none were taken."""
        from probes.tape.files.safe_open import file_problem
        from probes.tape.redaction.secrets import Redactor

        files = sorted(self._folder.stacks.glob("*")) if self._folder.stacks.is_dir() else []
        redact = Redactor.of(self._folder.private_manifest())
        texts = {path.name: redact(path.read_text(errors="replace")) for path in files if not file_problem(path)}
        # Leave out empty files: each rank creates its file when it starts.
        return {name: text for name, text in texts.items() if text.strip()}

    def figures(self, finding: Finding) -> tuple[Drawing, ...]:
        """Return the figures that the dashboard shows for a finding, each with a title and a Plotly figure."""
        from analyzers.report.evidence import drawings
        from store import Store

        with Store.open(self._folder) as store:
            return tuple(drawings(store, finding))

    def compare(self, other: Run) -> Comparison:
        """Compare this run (A) with another (B): settings, versions, speed, phases, loss, findings, goodput.

        Raises ValueError for anything that is not a run."""
        given: object = other  # a caller may not check its types
        if not isinstance(given, Run):
            what = "files have no steps to compare" if isinstance(given, Evidence) else f"not a {type(given).__name__}"
            raise ValueError(f"compare needs another run, from rankscope.open_run: {what}")
        from analyzers.compare.two_runs import Side, compare
        from store import Store

        with Store.open(self._folder) as a, Store.open(other._folder) as b:
            return compare(
                Side(source=a, manifest=self.manifest, diagnosis=self.diagnose()),
                Side(source=b, manifest=other.manifest, diagnosis=other.diagnose()),
            )

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}): {self.verdict}"

    def _version(self) -> object:
        """Return a value that changes whenever a record is added to the store."""
        return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._run_folder.stores())


class Evidence(_Diagnosed):
    """Files of a job that Rankscope did not record."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths: tuple[Path, ...] = tuple(paths)
        self._diagnosis: Diagnosis | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if not name.startswith("_") and hasattr(Run, name):
                raise AttributeError(
                    f"{name} needs a recorded run, but these are files; open a run with rankscope.open_run"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def diagnose(self) -> Diagnosis:
        """Read and diagnose the files, once. Raises SourceError (a ValueError) if none can be read."""
        from analyzers.evidence.diagnose_files import diagnose_files

        if self._diagnosis is None:
            self._diagnosis = diagnose_files(self.paths)
        return self._diagnosis

    def __repr__(self) -> str:
        return f"Evidence({', '.join(map(str, self.paths))}): {self.verdict}"


def _published(address: str) -> Run:
    """Open a run at an address. Its local copy is refreshed on reads and removed with the object."""
    import weakref
    from tempfile import TemporaryDirectory

    from store.published.listing import newest_run
    from store.published.mirror import Mirror

    scratch = TemporaryDirectory(prefix="rankscope-")
    mirror = Mirror(newest_run(address)[0], Path(scratch.name))
    mirror.refresh()
    run = Run(mirror.run, mirror.refresh_if_old)
    weakref.finalize(run, mirror.close)
    weakref.finalize(run, scratch.cleanup)
    return run
