"""`rankscope analyze`: say what went wrong in a run, on which rank and why."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import RunArgument, console, fail

__all__ = ["EPILOG", "analyze"]

EPILOG = "Examples:  rankscope analyze runs/latest   |   rankscope analyze runs/latest --format json --fail-on warning"


def analyze(
    run: RunArgument,
    output: Annotated[str, typer.Option("--format", help="text or json.", metavar="text|json")] = "text",
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="critical|warning", help="Exit 1 if a finding is at least this severe.")
    ] = "",
) -> None:
    """Say what went wrong in a run, on which rank and why. Works on the files of a live or a dead run.

    RUN may also be a folder of a run that never heard of us: PyTorch flight-recorder dumps, or profiler traces.
    """
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    if fail_on not in ("", "critical", "warning"):
        fail(f"--fail-on {fail_on}: choose critical or warning")
    import time

    from analyzers.diagnose import diagnose, reaches
    from analyzers.sources.recognise import SourceError, diagnose_foreign
    from probes.rundir import RunDir, RunError
    from probes.store import Store, StoreError, is_watched
    from probes.tape_reader import TapeError

    try:
        if run.exists() and not RunDir.is_run(run):
            folder, diagnosis = RunDir(run), diagnose_foreign(run)
        else:
            folder = RunDir.open(run)
            with Store.open(folder) as store:
                now_ns = time.time_ns() if is_watched(folder.stores()) else None
                diagnosis = diagnose(store, folder.manifest(), now_ns=now_ns, stacks_dir=folder.stacks)
    except (RunError, StoreError, TapeError, SourceError) as error:
        fail(str(error))
    if output == "json":
        import json

        from analyzers.report.json import to_json

        typer.echo(json.dumps(to_json(diagnosis), indent=2))
    else:
        from analyzers.report.text import render

        render(diagnosis, console())
    if damaged := diagnosis.damaged_tapes:  # the verdict above is of what could be read
        more = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        fail(f"{folder.path / damaged[0]['path']}: {damaged[0]['problem']}{more}")
    if fail_on and reaches(diagnosis.findings, "critical" if fail_on == "critical" else "warning"):
        raise typer.Exit(1)
