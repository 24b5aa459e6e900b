"""Convert a job's logs, and the records of programs and plug-ins around it, to rows of one store.

read = read_lines(files, progress)
store.add("log_events", read.events); store.add("steps", read.steps); store.add("health", read.health)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from store.readers.job.job_files import JobFiles
from store.readers.logs.log_file import ReadLog
from store.readers.logs.rows import log_rows
from store.readers.logs.scan import read_log
from store.readers.programs.rows import StackOfProcess
from store.readers.ras import read_ras

__all__ = ["LineRows", "Progress", "read_lines"]

Progress = Callable[[str, int, int], None]
"""Called with the name of the file being read, bytes done, and bytes in total."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRows:
    """The text logs, and the rows of all files by table."""

    logs: Sequence[ReadLog]
    events: Rows
    steps: Rows
    health: Rows
    stacks: Sequence[StackOfProcess]
    num_plugin_events: int

    @property
    def num_lines(self) -> int:
        """Number of lines in logs and of events from plug-ins."""
        return sum(log.num_lines for log in self.logs) + self.num_plugin_events


def read_lines(files: JobFiles, progress: Progress) -> LineRows:
    """Read all these files. What is wrong with a file is listed in `files.problems`."""
    logs: list[ReadLog] = []
    paths = files.by_format["log"]
    total, done = sum(path.stat().st_size for path in paths), 0
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
    _correct_years(logs)
    logs += [read_ras(path) for path in files.by_format["ras"]]
    for log in logs:
        for problem in ([log.problem] if log.problem else []) + log.given_up:
            files.problems.add_problem(log.path, problem)
    events, steps = log_rows(logs, files.names)
    of_plugins = [row for rows in files.plugin_rows for row in rows.tables["log_events"]]
    return LineRows(
        logs=logs,
        events=[*events, *of_plugins, *files.programs.log_events()],
        steps=files.programs.steps(files.problems, steps),
        health=files.programs.health(),
        stacks=files.programs.stacks(),
        num_plugin_events=len(of_plugins),
    )


def _correct_years(logs: list[ReadLog]) -> None:
    """Read a log again if its times lack a year and the wrong year was assumed. The year is assumed from the file's
    modification time, which copying may change; the file or the job's other files may state another year.
    """
    of_job = {year for log in logs for year in log.years}
    for place, log in enumerate(logs):
        stated = log.years - {None} or of_job - {None}
        if None in log.years and len(stated) == 1 and log.year not in stated:
            logs[place] = read_log(log.path, year=next(iter(stated)))
