"""`rankscope compare`: differences between two runs, and the scaling of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import console, fail

__all__ = ["EPILOG", "compare"]

EPILOG = (
    "Examples:  rankscope compare runs/before runs/after   |   "
    "rankscope compare runs/before runs/after --format json --fail-on warning   |   "
    "rankscope compare runs/before runs/after --html compared.html   |   "
    "rankscope compare runs/on-1 runs/on-8 runs/on-64"
)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Two runs: what changed. More, or other numbers of ranks: how they scale.", metavar="RUN"),
    ],
    output: Annotated[str, typer.Option("--format", help="Output: text or json.", metavar="text|json")] = "text",
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page of two runs.")
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option("--fail-on", metavar="warning", help="Exit 1 if the second run is significantly slower."),
    ] = "",
) -> None:
    """Show what changed between two runs (settings, speed, phases, loss, findings, goodput), or how several scale."""
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    if fail_on not in ("", "warning"):
        fail(f"--fail-on {fail_on}: choose warning")
    if len(runs) < 2:
        fail(f"{runs[0]}: name a second run to compare it with")
    if len(runs) > 2 and (html is not None or fail_on):
        fail("--html and --fail-on compare two runs: name two")
    from contextlib import ExitStack

    from analyzers.compare.scaling import ScalingError, scaling_of
    from analyzers.compare.two_runs import Side
    from analyzers.compare.two_runs import compare as compare_sides
    from analyzers.diagnose import diagnose, reaches
    from analyzers.report.files import ReportError, write_page
    from probes.tape.reader import TapeError
    from probes.tape.rundir import RunDir, RunError
    from store import Store, StoreError

    comparison, scaling = None, None
    try:
        with ExitStack() as stores:
            sides = []
            for path in runs:
                folder = RunDir.open(path)
                store = stores.enter_context(Store.open(folder))
                diagnosis = diagnose(store, folder.manifest(), stacks_dir=folder.stacks)
                sides.append(Side(source=store, manifest=folder.manifest(), diagnosis=diagnosis))
            if len(sides) == 2:
                comparison = compare_sides(*sides)
            if len(sides) > 2 or len({side.diagnosis.run.get("num_ranks") for side in sides}) > 1:
                try:
                    scaling = scaling_of(sides)
                except ScalingError:
                    if comparison is None:
                        raise
            if html is not None and comparison is not None:
                from analyzers.report.html.compare_page import render as render_page
                from rankscope import __version__

                written = write_page(html, render_page(comparison, *sides, version=__version__))
    except (RunError, StoreError, TapeError, ReportError, ScalingError) as error:
        fail(str(error))
    if output == "json":
        import json

        from analyzers.report.json import plain

        values = comparison.to_json() if comparison is not None else {}
        values |= {"scaling": scaling.to_json()} if scaling is not None else {}
        typer.echo(json.dumps(plain(values), indent=2, allow_nan=False))
    else:
        if comparison is not None:
            from analyzers.report.terminal.compare_text import render

            render(comparison, console())
        if scaling is not None:
            from analyzers.report.terminal.scaling_text import render as render_scaling

            if comparison is not None:
                typer.echo()
            render_scaling(scaling, console())
    if html is not None and output == "text":
        typer.echo(f"\n{html}  {written / 1e6:.1f} MB")
    if fail_on and comparison is not None and reaches(comparison.findings, "warning"):
        raise typer.Exit(1)
