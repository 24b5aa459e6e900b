"""The command line: all commands, in the order in which `rankscope --help` lists them.

    rankscope train examples/gpt-demo.toml --set train.steps=100
    rankscope analyze runs/latest

Each command imports what it needs when it runs, so `rankscope analyze` starts without torch and streamlit.
"""

from __future__ import annotations

import sys

import typer

from rankscope.commands import (
    analyze,
    collect,
    collect_evidence,
    compare,
    dashboard,
    doctor,
    drill,
    dumps,
    export,
    plan,
    rebuild,
    replay,
    report,
    run,
    stacks,
    train,
    version,
    watch,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="rankscope",
    help="Train with telemetry on every rank, find the faulty one, and recover the run.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(epilog=train.EPILOG)(train.train)
app.command(epilog=run.EPILOG, context_settings=run.CONTEXT)(run.run)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=analyze.EPILOG)(analyze.analyze)
app.command(epilog=replay.EPILOG)(replay.replay)
app.command(epilog=drill.EPILOG)(drill.drill)
app.command(epilog=dashboard.EPILOG)(dashboard.dashboard)
app.command(epilog=report.EPILOG)(report.report)
app.command(epilog=export.EPILOG)(export.export)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=rebuild.EPILOG)(rebuild.rebuild)
app.command(epilog=collect.EPILOG)(collect.collect)
app.command(epilog=watch.EPILOG)(watch.watch)
app.command("collect-evidence", epilog=collect_evidence.EPILOG)(collect_evidence.collect_evidence)
app.command(epilog=stacks.EPILOG)(stacks.stacks)
app.command(epilog=dumps.EPILOG)(dumps.dumps)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command()(version.version)


_EXTRAS = {"torch": "train", "safetensors": "train"}
"""Packages that only some commands need, and the extra that installs them."""


def main() -> None:
    """Entry of the `rankscope` command."""
    try:
        app()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        sys.stderr.write(f"rankscope: this command needs {error.name}: pip install 'rankscope[{extra}]'\n")
        sys.exit(2)
