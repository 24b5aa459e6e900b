"""The command line: which commands there are, in the order in which `rankscope --help` lists them.

    rankscope train examples/gpt-demo.toml --set train.steps=100
    rankscope analyze runs/latest

Each command imports what it needs when it runs, so `rankscope analyze` starts without torch and streamlit.
"""

from __future__ import annotations

import typer

from rankscope.commands import analyze, compare, dashboard, drill, export, rebuild, report, train, version, watch

__all__ = ["app", "main"]

app = typer.Typer(
    name="rankscope",
    help="Train with telemetry on every rank, find the guilty one, and get the run back on its feet.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(epilog=train.EPILOG)(train.train)
app.command(epilog=analyze.EPILOG)(analyze.analyze)
app.command(epilog=drill.EPILOG)(drill.drill)
app.command(epilog=dashboard.EPILOG)(dashboard.dashboard)
app.command(epilog=report.EPILOG)(report.report)
app.command(epilog=export.EPILOG)(export.export)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=rebuild.EPILOG)(rebuild.rebuild)
app.command(epilog=watch.EPILOG)(watch.watch)
app.command()(version.version)


def main() -> None:
    """Entry of the `rankscope` command."""
    app()
