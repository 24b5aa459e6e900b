"""`rankscope compare`: what changed between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import console, fail

__all__ = ["EPILOG", "compare"]

EPILOG = (
    "Examples:  rankscope compare runs/before runs/after   |   "
    "rankscope compare runs/before runs/after --format json --fail-on warning   |   "
    "rankscope compare runs/before runs/after --html compared.html"
)


def compare(
    run_a: Annotated[Path, typer.Argument(help="The run to compare with.", metavar="RUN_A")],
    run_b: Annotated[Path, typer.Argument(help="The run that is compared.", metavar="RUN_B")],
    output: Annotated[str, typer.Option("--format", help="text or json.", metavar="text|json")] = "text",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="warning", help="Exit 1 if RUN_B is slower beyond doubt.")
    ] = "",
) -> None:
    """Say what changed between two runs: settings, speed, phases, loss, findings, goodput."""
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    if fail_on not in ("", "warning"):
        fail(f"--fail-on {fail_on}: choose warning")
    from contextlib import ExitStack

    from analyzers.compare import Side
    from analyzers.compare import compare as compare_sides
    from analyzers.diagnose import diagnose, reaches
    from analyzers.report.files import ReportError, write_page
    from probes.rundir import RunDir, RunError
    from probes.store import Store, StoreError
    from probes.tape_reader import TapeError

    try:
        with ExitStack() as stores:
            sides = []
            for path in (run_a, run_b):
                folder = RunDir.open(path)
                store = stores.enter_context(Store.open(folder))
                diagnosis = diagnose(store, folder.manifest(), stacks_dir=folder.stacks)
                sides.append(Side(source=store, manifest=folder.manifest(), diagnosis=diagnosis))
            comparison = compare_sides(*sides)
            if html is not None:
                from analyzers.report.compare_html import render as render_page
                from rankscope import __version__

                written = write_page(html, render_page(comparison, *sides, version=__version__))
    except (RunError, StoreError, TapeError, ReportError) as error:
        fail(str(error))
    if output == "json":
        import json

        from analyzers.report.json import plain

        typer.echo(json.dumps(plain(comparison.to_json()), indent=2, allow_nan=False))
    else:
        from analyzers.report.compare_text import render

        render(comparison, console())
    if html is not None and output == "text":
        typer.echo(f"\n{html}  {written / 1e6:.1f} MB")
    if fail_on and reaches(comparison.findings, "warning"):
        raise typer.Exit(1)
