"""`rankscope report`: write the diagnosis of a run to files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope import __version__
from rankscope.terminal import FormatOption, RunArgument, echo, fail, print_json, refuse_bad_output, wants_json

__all__ = ["EPILOG", "report"]

EPILOG = (
    "\b\nExamples:\nrankscope report runs/latest\n"
    "rankscope report runs/latest --markdown ticket.md\n"
    "rankscope report runs/latest --chrome-trace trace.json.gz --steps 38:42"
)


def report(
    run: RunArgument,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="One HTML page that works offline.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Markdown for an incident ticket.")
    ] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option("--chrome-trace", metavar="FILE", help="Trace for Perfetto; .gz compresses it.")
    ] = None,
    steps: Annotated[str, typer.Option("--steps", metavar="FIRST:LAST", help="Steps of the trace. Default: all.")] = "",
    output: FormatOption = "text",
) -> None:
    """Write the diagnosis of a run to files; without an option, as one page to RUN/reports/report.html."""
    as_json = wants_json(output)
    for option, path in (("--html", html), ("--markdown", markdown), ("--chrome-trace", chrome_trace)):
        refuse_bad_output(option, path)
    if steps and chrome_trace is None:
        fail(f"--steps {steps} is for a trace: add --chrome-trace FILE")
    from analyzers.account.long_run import MEMORY_BYTES
    from analyzers.report.files import ReportError, step_range, write_reports
    from analyzers.wording import size_text
    from probes.tape.format.reader import TapeError
    from probes.tape.rundir import RunDir, RunError
    from store import StoreError
    from watch.verdicts.diagnosed_run import diagnosed_run

    try:
        folder = RunDir.open(run)
        if html is None and markdown is None and chrome_trace is None:
            html = folder.reports / "report.html"
        chosen = step_range(steps)
        with diagnosed_run(folder, memory_bytes=MEMORY_BYTES, spills=True) as (store, diagnosis):
            manifest = folder.manifest()
            written = write_reports(
                store, diagnosis, manifest, html=html, markdown=markdown, chrome_trace=chrome_trace, steps=chosen,
                version=__version__,
            )  # fmt: skip
    except (RunError, StoreError, TapeError, ReportError) as error:
        fail(str(error))
    if as_json:
        files = [{"path": str(path), "bytes": num_bytes} for path, num_bytes in written]
        print_json({"run": folder.run_id, "verdict": diagnosis.verdict, "files": files})
        return
    for path, num_bytes in written:
        echo(f"{path}  {size_text(num_bytes)}")
