"""Diagnose the files that a job left, of any supported format, and join the findings in one verdict.

    diagnosis = diagnose_files([Path("logs"), Path("dumps"), Path("dmesg-gpu-01.txt.gz")])
    diagnosis.verdict

1. Every file below the paths is recognised by its content and read into rows (`store.readers`, `store.readers.job`).
2. The sources are the rows of plug-ins, the lines of logs with the records of other programs, and the files of each
   format for which an analysis is registered. The analyses of recorded runs judge each source in a store of its own,
   because two sources of a job count the same steps and calls in different ways, by different clocks.
3. Findings about the same event are joined (`joining`), and so are the facts.
4. The report lists what was read and what was left out, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from analyzers.analysis import FileAnalysis, file_analyses
from analyzers.diagnose import Diagnosis, conclude, diagnose, failed_check
from analyzers.evidence.job_lines import judge_lines
from analyzers.evidence.joining import join
from analyzers.evidence.judged import Judged, with_facts_of
from analyzers.finding import Finding
from analyzers.logs.wording import ANALYZER
from analyzers.run.records.not_recorded import without_switches
from probes.tape.redaction.printable import visible
from store.readers.job.job_files import JobFiles, job_files, nothing_read
from store.readers.job.job_rows import Progress
from store.readers.memory_store import MemoryStore
from store.readers.plugins.plugin_formats import PluginRows, plugin_problems
from store.readers.untrusted.external_files import SourceError, Survey

__all__ = ["Progress", "SourceError", "diagnose_files"]
_FACTS = ("num_ranks", "steps", "steps_not_measured_ratio", "steps_not_compared_ratio")


def diagnose_files(paths: Sequence[Path], *, progress: Progress | None = None) -> Diagnosis:
    """Diagnose files that Rankscope did not record. Raises SourceError with one line if none can be read."""
    with ExitStack() as scratch:
        files = job_files(paths, scratch)
        if not files.formats:
            raise SourceError(nothing_read(paths, files))
        facts: dict[str, Any] = {"run_id": paths[0].name or str(paths[0])}
        findings: dict[str, Sequence[Finding]] = {}
        what_if = None
        for judged in _sources(files, progress or (lambda what, done, total: None)):
            findings |= judged.findings
            facts = with_facts_of(facts, judged)
            what_if = judged.what_if or what_if
        if not any(map(_is_judged, findings.values())):
            facts["is_judged"] = False
        diagnosis = conclude(join(findings), facts | _facts_of(files, facts), what_if=what_if)
        return _with_verdict_of_logs(diagnosis, files)


def _sources(files: JobFiles, progress: Progress) -> Iterator[Judged]:
    """Judge one source after the other; a fact from an earlier source takes precedence."""
    if any(rows.has_records for rows in files.plugin_rows):
        yield judge_plugin_rows(files.plugin_rows)
    if files.has_lines:
        yield judge_lines(files, progress)
    for analysis in file_analyses():
        if files.by_format[analysis.format]:
            yield _analyzed(analysis, files)


def _analyzed(analysis: FileAnalysis, files: JobFiles) -> Judged:
    """Findings and facts of the files of one format; if an analysis fails, only its findings are missing."""
    found = Survey(paths=files.by_format[analysis.format])
    rows = analysis.read(found)
    files.problems.problems += found.problems
    facts = analysis.facts(rows)
    try:
        return Judged(findings={analysis.format: analysis.run(rows)}, facts=facts, what_if=analysis.what_if(rows))
    except Exception as error:
        return Judged(findings={analysis.format: [failed_check(analysis.kind, error, "job's files")]}, facts=facts)


def _is_judged(findings: Sequence[Finding]) -> bool:
    """Return True if any check was made, even if it found nothing or covered only a part of the files."""
    return not findings or any(
        one.status != "insufficient_data" or one.evidence.get("is_partly_checked") for one in findings
    )


def _facts_of(files: JobFiles, facts: dict[str, Any]) -> dict[str, Any]:
    """List what was read, and what was left out and why. How the job ended is stated only if all files have one format
    or are logs."""
    for plugin, problem in plugin_problems().items():
        files.problems.add_problem(Path(plugin), f"plug-in not loaded: {visible(problem)}")
    shows_end = len(files.formats) == 1 or files.are_logs
    return {
        "input": files.formats[0] if len(files.formats) == 1 else "several",
        "files_read": files.num_read,
        "ended": facts.get("ended") if shows_end else "not recorded",
        "file_problems": sorted(files.problems.problems, key=lambda problem: problem["path"]),
    }


def _with_verdict_of_logs(diagnosis: Diagnosis, files: JobFiles) -> Diagnosis:
    """If nothing fired, state how the logs end, because a log without a cause does not prove that there was none."""
    if diagnosis.fired:
        return diagnosis
    unjudged = [one for one in diagnosis.not_judged if one.analyzer == ANALYZER]
    logs: Any = diagnosis.run.get("logs", {})
    text = unjudged[0].summary if unjudged else logs.get("outcome") if files.are_logs else ""
    return replace(diagnosis, verdict=text) if text else diagnosis


def judge_plugin_rows(read: Sequence[PluginRows]) -> Judged:
    """Judge the rows of all plug-ins' files together: findings, facts and the what-if. Reasons for missing checks name
    no setting, because Rankscope did not record the job. Log events that a plug-in reads are judged with the other logs
    (`job_lines`) and not with the plug-in's steps, because log and program may count steps in different ways.
    """
    with MemoryStore() as store:
        for table in ("steps", "collectives", "events"):
            if rows := [row for one in read for row in one.tables[table]]:
                store.add(table, rows)
        diagnosis = diagnose(store, {})
        ((num_ranks,),) = store.rows("SELECT count(DISTINCT rank) FROM steps WHERE rank >= 0")
    facts = {name: diagnosis.run[name] for name in _FACTS if name in diagnosis.run}
    facts["num_ranks"] = facts.get("num_ranks") or num_ranks or None
    findings = [replace(one, summary=without_switches(one.summary)) for one in diagnosis.findings
                if not (one.kind == "configuration" and one.status == "insufficient_data")]  # fmt: skip
    return Judged(findings={"plugin": findings}, facts=facts, what_if=diagnosis.what_if)
