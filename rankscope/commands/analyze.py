"""`rankscope analyze`: say what went wrong in a run, on which rank and why."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.terminal import RunArgument, console, fail

__all__ = ["EPILOG", "analyze"]

EPILOG = (
    "Examples:  rankscope analyze runs/latest   |   rankscope analyze runs/latest --why-spike worst   |   "
    "rankscope analyze runs/latest --format json --fail-on warning"
)


def analyze(
    run: RunArgument,
    output: Annotated[str, typer.Option("--format", help="text or json.", metavar="text|json")] = "text",
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="critical|warning", help="Exit 1 if a finding is at least this severe.")
    ] = "",
    why_spike: Annotated[
        str, typer.Option("--why-spike", metavar="STEP|worst", help="Which ranks, samples and layers made a loss jump.")
    ] = "",
) -> None:
    """Say what went wrong in a run, on which rank and why. Works on the files of a live or a dead run.

    RUN may also be a folder of a run that never heard of us: PyTorch flight-recorder dumps, or profiler traces.
    """
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    if fail_on not in ("", "critical", "warning"):
        fail(f"--fail-on {fail_on}: choose critical or warning")
    if why_spike and why_spike != "worst" and not why_spike.isdecimal():
        fail(f"--why-spike {why_spike}: give a step, or worst")
    import time

    from analyzers.account.long_run import MEMORY_BYTES
    from analyzers.diagnose import diagnose, reaches
    from analyzers.external.recognise import SourceError, diagnose_foreign
    from analyzers.numerics.why_spike import SpikeError, WhySpike, explain
    from probes.tape.reader import TapeError
    from probes.tape.rundir import RunDir, RunError
    from store import Store, StoreError, is_watched

    spike: WhySpike | None = None
    try:
        if run.exists() and not RunDir.is_run(run):
            if why_spike:
                fail(f"--why-spike {why_spike}: {run} is no run of Rankscope, and knows no losses")
            folder, diagnosis = RunDir(run), diagnose_foreign(run)
        else:
            folder = RunDir.open(run)
            with Store.open(folder, memory_bytes=MEMORY_BYTES, spills=True) as store:
                if why_spike:
                    spike = explain(store, None if why_spike == "worst" else int(why_spike))
                now_ns = time.time_ns() if is_watched(folder.stores()) else None
                diagnosis = diagnose(store, folder.manifest(), now_ns=now_ns, stacks_dir=folder.stacks)
    except (RunError, StoreError, TapeError, SourceError, SpikeError) as error:
        fail(str(error))
    if output == "json":
        import json

        from analyzers.report.json import plain, to_json

        more = {} if spike is None else {"why_spike": plain(spike.to_json())}
        typer.echo(json.dumps(to_json(diagnosis) | more, indent=2))
    elif spike is not None:
        from analyzers.report.terminal.why_spike_text import render as render_spike

        render_spike(spike, console())
    else:
        from analyzers.report.terminal.diagnosis_text import render

        render(diagnosis, console())
    if damaged := diagnosis.damaged_tapes:  # the verdict above is of what could be read
        others = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
        fail(f"{folder.path / damaged[0]['path']}: {damaged[0]['problem']}{others}")
    if fail_on and reaches(diagnosis.findings, "critical" if fail_on == "critical" else "warning"):
        raise typer.Exit(1)
