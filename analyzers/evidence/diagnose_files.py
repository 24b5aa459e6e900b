"""Diagnose the files that a job left, of any supported format, and join the findings in one verdict.

    diagnosis = diagnose_files([Path("logs"), Path("dumps"), Path("dmesg-gpu-01.txt.gz")])
    diagnosis.verdict

1. Every file below the paths is recognised by its content; archives are unpacked into a temporary folder.
2. Text logs fill one store in memory and rows of plug-ins another; all analyses run on these. Dumps and traces are
   read per rank.
3. Each source is judged, then the findings of all are joined: `joining`.
4. The report lists what was read and what was left out, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from analyzers.analysis import FileAnalysis, file_analyses
from analyzers.diagnose import Diagnosis, conclude, diagnose, failed_check
from analyzers.evidence.joining import join
from analyzers.evidence.log_findings import analyze as findings_of_lines
from analyzers.evidence.outcome import earlier_ends, ended_text, num_steps, outcome_of, printed_losses
from analyzers.evidence.printed_steps import can_be_judged, printed_step_findings
from analyzers.evidence.program_records import ReadPrograms
from analyzers.finding import Finding
from analyzers.logs.log_events import LogBook
from analyzers.logs.wording import ANALYZER
from analyzers.run.records.not_recorded import without_switches
from analyzers.whatif.what_if import WhatIf
from probes.tape.redaction.printable import visible
from probes.tape.rundir import RunDir
from store.readers.dumps.debug_server import dumps_of_page
from store.readers.formats import FORMATS, Format, format_of
from store.readers.logs.log_file import ReadLog
from store.readers.logs.rows import log_rows
from store.readers.logs.scan import read_log
from store.readers.memory_store import MemoryStore
from store.readers.plugins.plugin_formats import HEAD_BYTES, PluginRows, plugin_problems, read_by_plugin
from store.readers.programs.registry import program_of, text_of, wraps_text
from store.readers.ras import read_ras
from store.readers.unknown import packed_with, unknown_document
from store.readers.untrusted.archives import expand
from store.readers.untrusted.external_files import SourceError, Survey, head, survey

__all__ = ["Progress", "SourceError", "diagnose_files"]

Progress = Callable[[str, int, int], None]
"""Called with the name of what is being read, bytes done, and bytes in total."""

_READ = "rankscope analyze --help lists what is read"
_PLUGIN_FACTS = ("num_ranks", "steps", "steps_not_measured_ratio", "steps_not_compared_ratio")


@dataclass(slots=True)
class _Files:
    """The files of all paths by format; `names` are those that the report shows."""

    by_format: dict[Format, list[Path]] = field(default_factory=lambda: {name: [] for name in FORMATS})
    names: dict[Path, str] = field(default_factory=dict)
    plugin_rows: list[PluginRows] = field(default_factory=list)
    programs: ReadPrograms = field(default_factory=ReadPrograms)
    problems: Survey = field(default_factory=Survey)
    scratch: ExitStack = field(default_factory=ExitStack)
    other: int = 0


def diagnose_files(paths: Sequence[Path], *, progress: Progress | None = None) -> Diagnosis:
    """Diagnose files that Rankscope did not record. Raises SourceError with one line if none can be read."""
    with ExitStack() as scratch:
        files = _files(paths, scratch)
        name = paths[0].name or str(paths[0])
        if not any(files.by_format.values()):
            raise SourceError(_nothing(paths, files))
        findings, facts, what_if = _judged(files, name, progress or (lambda what, done, total: None))
        diagnosis = conclude(findings, facts, what_if=what_if)
        unjudged = [one for one in findings if one.analyzer == ANALYZER and one.status == "insufficient_data"]
        if unjudged and not diagnosis.fired:  # a log that names no cause does not prove that there was none
            return replace(diagnosis, verdict=unjudged[0].summary)
        outcome = facts.get("logs", {}).get("outcome")
        if outcome and not diagnosis.fired and _are_of_logs(_formats(files)):
            return replace(diagnosis, verdict=outcome)
        return diagnosis


def _files(paths: Sequence[Path], scratch: ExitStack) -> _Files:
    files = _Files(scratch=scratch)
    for path in paths:
        if not path.exists():
            raise SourceError(f"no such file or folder: {path}")
        found = survey(path)
        files.problems.problems += found.problems
        for file in found.paths:
            _take(file, str(file.relative_to(path)) if path.is_dir() else path.name, files, scratch)
    if files.other:
        files.problems.add_problem(
            paths[0], f"{files.other} file{'s' * (files.other != 1)} of other formats left unread"
        )
    return files


def _take(path: Path, name: str, files: _Files, scratch: ExitStack | None) -> None:
    """Add a file under its format; an archive is replaced by its members. Nested archives are not unpacked."""
    try:
        found = format_of(path)
        problem = unknown_document(path) if found == "log" or not path.stat().st_size else ""
    except SourceError as error:
        files.problems.add_problem(path, str(error))
        return
    if problem:
        files.problems.add_problem(path, problem)
        return
    if found is None and (packer := packed_with(path)):
        files.problems.add_problem(path, f"is packed with {packer}, which is not read: unpack it")
    elif found is None:
        files.other += 1
    elif found == "program":
        _take_program(path, name, files, scratch)
    elif found not in ("archive", "page"):
        files.by_format[found].append(path)
        files.names[path] = visible(name)
    elif scratch is None:
        files.problems.add_problem(path, "is an archive within an archive: unpack it")
    else:
        into = Path(scratch.enter_context(TemporaryDirectory(prefix="rankscope-")))
        try:
            problems = list(dumps_of_page(path, into).items()) if found == "page" else expand(path, into)
            for member, problem in problems[:20]:
                files.problems.add_problem(Path(visible(member)), visible(problem))
        except SourceError as error:
            files.problems.add_problem(path, str(error))
        inside = survey(into)
        files.problems.problems += inside.problems
        for member_path in inside.paths:
            _take(member_path, f"{name}/{member_path.relative_to(into)}", files, None)


def _take_program(path: Path, name: str, files: _Files, scratch: ExitStack | None) -> None:
    """Read a program's file; if it wraps a text log, add its lines as a log."""
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
        files.problems.add_problem(path, str(error))
        return
    files.by_format["log"].append(text)
    files.names[text] = visible(name)


def _formats(files: _Files) -> list[Format]:
    return [one for one in FORMATS if files.by_format[one]]


def _are_of_logs(formats: Sequence[Format]) -> bool:
    """Return True for text logs and programs' files, whose lines are joined and tell the end together."""
    return all(one in ("log", "program") for one in formats)


def _judged(files: _Files, name: str, progress: Progress) -> tuple[list[Finding], dict[str, Any], WhatIf | None]:
    what_if: WhatIf | None = None
    findings: dict[str, list[Finding]] = {}
    facts: dict[str, Any] = {"run_id": name}
    inputs = _formats(files)
    _read_plugin_files(files)
    if any(rows.has_records for rows in files.plugin_rows):
        findings["plugin"], facts, what_if = _judge_plugin_rows(files.plugin_rows, facts)
    findings |= {source: found for source, found in files.programs.findings().items() if found is not None}
    if any(files.by_format[one] for one in ("log", "ras", "plugin", "program")):
        findings["log"], of_logs = _judge_logs(files, progress)
        facts = {**of_logs, **{key: value for key, value in facts.items() if value is not None}}
        if (
            all(one.status == "advice" for one in findings["log"])
            and "plugin" not in findings
            and not facts["logs"]["outcome"]
            and len(inputs) == 1
            and inputs[0] in ("log", "plugin")
        ):
            findings["log"].append(Finding.insufficient("logs", "rank_lost", facts["logs"].pop("silence")))
        facts["logs"].pop("silence", None)
        has_judged_steps = facts.pop("has_judged_steps")
        if not (findings["log"] or has_judged_steps or facts["logs"]["outcome"]):
            del findings["log"]  # no line and no step that an analysis could use
            if facts["steps"]:
                text = "The steps were not checked: they have no loss, no gradient norm and too few durations."
                findings["steps"] = [Finding.insufficient("spike", "loss_spike", text)]
    for analysis in file_analyses():
        if paths := files.by_format[analysis.format]:
            found = Survey(paths=paths)
            findings[analysis.format], of_files, built = _analyzed(analysis, found)
            what_if = built or what_if
            num_ranks = max(of_files.get("num_ranks") or 0, facts.get("num_ranks") or 0) or None
            facts = {**of_files, **{key: value for key, value in facts.items() if value is not None}}
            facts["num_ranks"] = num_ranks
            files.problems.problems += found.problems
    facts["input"] = inputs[0] if len(inputs) == 1 else "several"
    if not any(map(_is_judged, findings.values())):
        facts["is_judged"] = False
    facts["files_read"] = {FORMATS[one]: len(files.by_format[one]) for one in inputs
                           if one not in ("program", "plugin")}  # fmt: skip
    facts["files_read"] |= Counter(f"file of plug-in {one.plugin}" for one in files.plugin_rows)
    facts["files_read"] |= files.programs.names
    facts["ended"] = facts.get("ended") if len(inputs) == 1 or _are_of_logs(inputs) else "not recorded"
    for plugin, problem in plugin_problems().items():
        files.problems.add_problem(Path(plugin), f"plug-in not loaded: {visible(problem)}")
    facts["file_problems"] = sorted(files.problems.problems, key=lambda problem: problem["path"])
    return join(findings), facts, what_if


def _analyzed(analysis: FileAnalysis, found: Survey) -> tuple[list[Finding], dict[str, Any], WhatIf | None]:
    """Findings and facts of the files of one format; an analysis that fails loses only its own findings."""
    rows = analysis.read(found)
    facts = analysis.facts(rows)
    try:
        return analysis.run(rows), facts, analysis.what_if(rows)
    except Exception as error:
        return [failed_check(analysis.kind, error, "job's files")], facts, None


def _is_judged(findings: Sequence[Finding]) -> bool:
    """Return True if any check was made, with or without a result, also if a part of the files was not checked."""
    return not findings or any(
        one.status != "insufficient_data" or one.evidence.get("checked_in_part") for one in findings
    )


def _read_plugin_files(files: _Files) -> None:
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


def _judge_logs(files: _Files, progress: Progress) -> tuple[list[Finding], dict[str, Any]]:
    logs: list[ReadLog] = []
    paths = files.by_format["log"]
    total = sum(path.stat().st_size for path in paths)
    done = 0
    for path in paths:
        progress(files.names[path], done, total)
        log = read_log(
            path,
            progress=lambda num_bytes, path=path, done=done: progress(  # type: ignore[misc]
                files.names[path], done + num_bytes, total
            ),
        )
        done += path.stat().st_size
        logs.append(log)
    logs += [read_ras(path) for path in files.by_format["ras"]]
    for log in logs:
        for problem in ([log.problem] if log.problem else []) + log.given_up:
            files.problems.add_problem(log.path, problem)
    events, steps = log_rows(logs, files.names)
    events += [row for rows in files.plugin_rows for row in rows.tables["log_events"]] + files.programs.log_events()
    steps += files.programs.steps(files.problems)
    num_rows = sum(len(rows.tables["log_events"]) for rows in files.plugin_rows)
    with MemoryStore() as store:
        store.add("log_events", events)
        store.add("steps", steps)
        findings = findings_of_lines(store)
        findings += printed_step_findings(store, findings, steps)
        findings += [_left_open(log) for log in logs if log.unjudged]
        book = LogBook.load(store)
        outcome = outcome_of(book, logs, steps)
        printed = sorted({*book.seen, *(rank for log in logs for rank in log.printed)})
        losses = printed_losses(sorted(steps, key=lambda row: row["step"]))
        facts = {
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "num_ranks": book.world_size or len(printed) or None,
            "steps": num_steps(steps),
            "has_judged_steps": can_be_judged(steps),
            "ended": ended_text(book, findings, outcome.ended),
            "logs": {
                "files": len(paths),
                "lines": sum(log.num_lines for log in logs) + num_rows,
                "bytes": sum(log.num_bytes for log in logs),
                "known_lines": len(events),
                "ranks_that_printed": printed[:1000],
                "printed_losses": len(losses),
                "finished": outcome.ended == "finished",
                "outcome": outcome.text if outcome.is_known else "",
                "silence": outcome.text if num_rows or any(log.num_lines for log in logs) else _NOTHING_READ,
                "earlier_ends": earlier_ends(book),
            },
        }
    return findings, facts


def _left_open(log: ReadLog) -> Finding:
    what = "Hangs were not fully checked" if log.is_compared else "Hangs were not checked"
    return Finding.not_judged("hang", "hang", what, log.unjudged, in_part=log.is_compared)


_NOTHING_READ = "Nothing was judged: no line or row was read from the files."


def _nothing(paths: Sequence[Path], files: _Files) -> str:
    shown, problems = visible(str(paths[0])), files.problems.problems
    known = "no run, no text log, no flight-recorder dumps and no profiler traces"
    if len(paths) == 1 and not paths[0].is_dir():
        is_unknown = files.other and len(problems) == 1
        reason = f"{visible(problems[0]['problem'])}; it " if problems and not is_unknown else ""
        return f"{shown} {reason}is {known.replace('dumps', 'dump').replace('traces', 'trace')}. {_READ}"
    if RunDir.is_run(paths[0]):
        return f"{shown} is a run's folder, not a job's files: give it alone, or to rankscope.open_run"
    unread = visible(f" ({problems[0]['path']} {problems[0]['problem']})") if problems else ""
    return f"{shown} holds {known}{unread}. {_READ}"


def _judge_plugin_rows(
    read: Sequence[PluginRows], facts: Mapping[str, Any]
) -> tuple[list[Finding], dict[str, Any], WhatIf | None]:
    """The findings over the rows of all plug-ins' files together, the facts with what they add, and the what-if.

    The reasons for checks that were not made name no setting: Rankscope did not record the job. Events of logs are
    judged with the other logs (`analyzers.logs`).
    """
    with MemoryStore() as store:
        for table in ("steps", "collectives", "events"):
            if rows := [row for one in read for row in one.tables[table]]:
                store.add(table, rows)
        diagnosis = diagnose(store, {"run_id": facts.get("run_id")})
        ((num_ranks,),) = store.rows("SELECT count(DISTINCT rank) FROM steps WHERE rank >= 0")
    own = {name: diagnosis.run[name] for name in _PLUGIN_FACTS if name in diagnosis.run}
    own["num_ranks"] = own.get("num_ranks") or num_ranks or None
    findings = [replace(one, summary=without_switches(one.summary)) for one in diagnosis.findings
                if not (one.kind == "configuration" and one.status == "insufficient_data")]  # fmt: skip
    return findings, {**facts, **own}, diagnosis.what_if
