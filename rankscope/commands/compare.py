"""`rankscope compare`: differences between two runs, and the scaling of several."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.terminal import FormatOption, console, echo, fail, refuse_bad_output, wants_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from analyzers.compare.scaling import Scaling
    from analyzers.compare.two_runs import Comparison

__all__ = ["EPILOG", "compare"]

EPILOG = (
    "\b\nExamples:\nrankscope compare runs/before runs/after\n"
    "rankscope compare runs/before runs/after --format json --fail-on slower:10 --fail-on loss\n"
    "rankscope compare runs/before runs/after --html compared.html\n"
    "rankscope compare runs/on-1 runs/on-8 runs/on-64"
)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Two runs: what changed between them. More runs, or runs of different sizes: how training scales.",
            metavar="RUN...",
        ),
    ],
    output: FormatOption = "text",
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write an HTML page that compares two runs.")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="slower[:PERCENT]|loss|findings|critical",
            help="Condition for exit code 1; repeatable. slower: the second run is slower, with the whole 95 % "
            "interval above PERCENT (5). loss: its loss is higher by more than the noise, or only its loss ends as "
            "NaN or Inf. findings: it has a finding that the first lacks. critical: one of these is critical. With too "
            "few steps to tell, slower and loss also give exit code 1.",
        ),
    ] = None,
) -> None:
    """Show what changed between two runs (settings, speed, phases, loss, findings, goodput), or how several scale.

    Exit codes: 0 passed, 1 a --fail-on condition holds, 2 wrong options or no such run.
    """
    as_json = wants_json(output)
    from analyzers.compare.gate import GateError, failures, gates_of

    try:
        gates = gates_of(fail_on or ())
    except GateError as error:
        fail(f"--fail-on {error}")
    if len(runs) < 2:
        fail(f"{runs[0]}: name a second run to compare it with")
    folders = [path.resolve() for path in runs]
    # A CI gate that compares a run with itself would pass a candidate that was never trained.
    if doubled := [str(path) for path in runs if folders.count(path.resolve()) > 1]:
        fail(f"{' and '.join(doubled)} are the same run: name different runs")
    refuse_bad_output("--html", html)
    if len(runs) > 2 and (html is not None or fail_on):
        fail("--html and --fail-on need exactly two runs")
    from analyzers.compare.scaling import ScalingError
    from analyzers.report.files import ReportError
    from analyzers.wording import size_text
    from probes.tape.format.reader import TapeError
    from probes.tape.rundir import RunError
    from store import StoreError

    try:
        comparison, scaling, num_bytes = _compare(runs, html)
    except (RunError, StoreError, TapeError, ReportError, ScalingError) as error:
        fail(str(error))
    _print(comparison, scaling, as_json)
    if html is not None and not as_json:
        echo(f"\n{html}  {size_text(num_bytes)}")
    reasons = failures(comparison, gates) if comparison is not None else []
    for reason in reasons:
        echo(f"rankscope: {reason}", err=True)
    if reasons:
        raise typer.Exit(1)


def _compare(runs: Sequence[Path], html: Path | None) -> tuple[Comparison | None, Scaling | None, int]:
    """Compare two runs, or find how several scale. Writes the page `html` and returns its size."""
    from contextlib import ExitStack

    from analyzers.compare.scaling import ScalingError, scaling_of
    from analyzers.compare.two_runs import Side
    from analyzers.compare.two_runs import compare as compare_sides
    from probes.tape.rundir import RunDir
    from watch.verdicts.diagnosed_run import diagnosed_run

    comparison, scaling, num_bytes = None, None, 0
    with ExitStack() as stores:
        sides = []
        for path in runs:
            folder = RunDir.open(path)
            # `diagnosed_run` knows whether the run is live; a plain diagnosis would call a live run dead.
            store, diagnosis = stores.enter_context(diagnosed_run(folder))
            sides.append(Side(source=store, manifest=folder.manifest(), diagnosis=diagnosis))
        if len(sides) == 2:
            comparison = compare_sides(sides[0], sides[1])
        if len(sides) > 2 or len({side.diagnosis.run.get("num_ranks") for side in sides}) > 1:
            try:
                scaling = scaling_of(sides)
            except ScalingError:
                if comparison is None:
                    raise
        if html is not None and comparison is not None:
            from analyzers.report.files import write_page
            from analyzers.report.html.compare_page import render
            from rankscope import __version__

            num_bytes = write_page(html, render(comparison, *sides, version=__version__))
    return comparison, scaling, num_bytes


def _print(comparison: Comparison | None, scaling: Scaling | None, as_json: bool) -> None:
    if as_json:
        import json

        from analyzers.report.json import plain

        values = comparison.to_json() if comparison is not None else {}
        values |= {"scaling": scaling.to_json()} if scaling is not None else {}
        echo(json.dumps(plain(values), indent=2, allow_nan=False))
        return
    if comparison is not None:
        from analyzers.report.terminal.compare_text import render

        render(comparison, console())
    if scaling is not None:
        from analyzers.report.terminal.scaling_text import render as render_scaling

        if comparison is not None:
            echo()
        render_scaling(scaling, console())
