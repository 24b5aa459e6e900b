"""Find a job's files and group them by format; read program and plug-in files here, because several checks use them.

    files = job_files([Path("logs"), Path("dumps")], scratch)
    files.by_format["flight_recorder"], files.problems
    raise SourceError(nothing_read(paths, files))          # if no file was recognised

Archives are unpacked into temporary folders that are deleted with `scratch`. Unusable files are listed with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from probes.tape.redaction.printable import visible
from probes.tape.rundir import RunDir
from store.readers.dumps.debug_server import dumps_of_page
from store.readers.formats import FORMATS, Format, format_of
from store.readers.job.program_files import ReadPrograms
from store.readers.plugins.plugin_formats import HEAD_BYTES, PluginRows, read_by_plugin
from store.readers.programs.registry import program_of, text_of, wraps_text
from store.readers.unknown import EMPTY, packed_with, unknown_document
from store.readers.untrusted.archives import expand
from store.readers.untrusted.external_files import SourceError, Survey, head, survey

__all__ = ["JobFiles", "job_files", "nothing_read"]

_HELP = "rankscope analyze --help lists the supported formats"


@dataclass(slots=True)
class JobFiles:
    """The files of all paths by format. `names`: their names in the report."""

    by_format: dict[Format, list[Path]] = field(default_factory=lambda: {name: [] for name in FORMATS})
    names: dict[Path, str] = field(default_factory=dict)
    plugin_rows: list[PluginRows] = field(default_factory=list)
    programs: ReadPrograms = field(default_factory=ReadPrograms)
    problems: Survey = field(default_factory=Survey)
    scratch: ExitStack = field(default_factory=ExitStack)
    empty: dict[Path, str] = field(default_factory=dict)
    """Files without any text, with their names."""
    other: int = 0
    """Number of files of unsupported formats."""

    @property
    def formats(self) -> list[Format]:
        """Formats with at least one file."""
        return [one for one in FORMATS if self.by_format[one]]

    @property
    def has_lines(self) -> bool:
        """Return True if there are logs, or files of programs or plug-ins, which are judged together with logs."""
        return any(self.by_format[one] for one in ("log", "ras", "plugin", "program"))

    @property
    def are_logs(self) -> bool:
        """Return True if there are only logs and files of programs, which together show how the job ended."""
        return all(one in ("log", "program") for one in self.formats)

    @property
    def num_read(self) -> dict[str, int]:
        """Number of files by kind, in words."""
        of_formats = {FORMATS[one]: len(self.by_format[one]) for one in self.formats
                      if one not in ("program", "plugin")}  # fmt: skip
        of_plugins = Counter(f"file of plug-in {one.plugin}" for one in self.plugin_rows)
        return {**of_formats, **of_plugins, **self.programs.names}


def job_files(paths: Sequence[Path], scratch: ExitStack) -> JobFiles:
    """Find the files below the paths. Raises SourceError for a path that does not exist."""
    files = JobFiles(scratch=scratch)
    for path in paths:
        if not path.exists():
            raise SourceError(f"no such file or folder: {path}")
        found = survey(path)
        files.problems.problems += found.problems
        for file in found.paths:
            _add(file, str(file.relative_to(path)) if path.is_dir() else path.name, files, scratch)
    if files.other:
        files.problems.add_problem(paths[0], f"{files.other} file{'s' * (files.other != 1)} of other formats not read")
    _read_plugin_files(files)
    return files


def _add(path: Path, name: str, files: JobFiles, scratch: ExitStack | None) -> None:
    """Add a file under its format; for an archive, add its members instead. Nested archives are not unpacked."""
    try:
        found = format_of(path)
        problem = unknown_document(path) if found == "log" or not path.stat().st_size else ""
    except SourceError as error:
        files.problems.add_problem(Path(name), str(error))
        return
    if problem:
        files.problems.add_problem(Path(name), problem)
        files.empty |= {path: visible(name)} if problem == EMPTY else {}
        return
    if found is None and (packer := packed_with(path)):
        files.problems.add_problem(Path(name), f"is packed with {packer}, which is not supported: unpack it")
    elif found is None:
        files.other += 1
    elif found == "program":
        _add_program(path, name, files, scratch)
    elif found not in ("archive", "page"):
        files.by_format[found].append(path)
        files.names[path] = visible(name)
    elif scratch is None:
        files.problems.add_problem(Path(name), "is an archive within an archive: unpack it")
    else:
        into = Path(scratch.enter_context(TemporaryDirectory(prefix="rankscope-")))
        try:
            problems = list(dumps_of_page(path, into).items()) if found == "page" else expand(path, into)
        except SourceError as error:
            problems = [(name, str(error))]
        inside = survey(into)
        for run in _runs_among(inside.paths, into):
            what = f"holds the records of run {visible(run.name)}" if run != into else "holds the records of a run"
            files.problems.add_problem(Path(name), f"{what}, which were not read: unpack it and analyze that folder")
        for member, problem in problems[:20]:
            files.problems.add_problem(Path(visible(member)), visible(problem))
        files.problems.problems += inside.problems
        for member_path in inside.paths:
            _add(member_path, f"{name}/{member_path.relative_to(into)}", files, None)


def _runs_among(paths: Sequence[Path], into: Path) -> list[Path]:
    """Folders of recorded runs in an unpacked archive."""
    folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(into)}
    return sorted(folder for folder in folders if RunDir(folder).tapes.is_dir() or RunDir(folder).stores())


def _add_program(path: Path, name: str, files: JobFiles, scratch: ExitStack | None) -> None:
    """Read a program's file. If it wraps a text log, add that as a log."""
    program = program_of(head(path, HEAD_BYTES))
    if program is None:
        return
    if not wraps_text(program):
        files.programs.take(path, program, visible(name), files.problems)
        files.by_format["program"].append(path)
        return
    into = Path((scratch or files.scratch).enter_context(TemporaryDirectory(prefix="rankscope-")))
    try:
        text = text_of(program, path, into)
    except SourceError as error:
        files.problems.add_problem(Path(name), str(error))
        return
    files.by_format["log"].append(text)
    files.names[text] = visible(name)


def _read_plugin_files(files: JobFiles) -> None:
    for path in files.by_format["plugin"]:
        try:
            found = read_by_plugin(path, files.names[path])
        except SourceError as error:
            files.problems.add_problem(path, str(error))
            continue
        for reason in found.refused:
            files.problems.add_problem(path, f"plug-in {found.plugin}: {visible(reason)}")
        if not found.num_rows:
            files.problems.add_problem(path, f"plug-in {found.plugin} read no row from it")
        files.plugin_rows.append(found)


def nothing_read(paths: Sequence[Path], files: JobFiles) -> str:
    """The one-line error if no file was recognised."""
    shown, problems = visible(str(paths[0])), files.problems.problems
    known = "no run, no text log, no flight-recorder dumps and no profiler traces"
    if len(paths) == 1 and not paths[0].is_dir():
        is_unknown = files.other and len(problems) == 1
        reason = f"{visible(problems[0]['problem'])}; it " if problems and not is_unknown else ""
        return f"{shown} {reason}is {known.replace('dumps', 'dump').replace('traces', 'trace')}. {_HELP}"
    if RunDir.is_run(paths[0]):
        return f"{shown} is a run's folder, not a job's files: give it alone, or to rankscope.open_run"
    unread = visible(f" ({problems[0]['path']} {problems[0]['problem']})") if problems else ""
    return f"{shown} holds {known}{unread}. {_HELP}"
