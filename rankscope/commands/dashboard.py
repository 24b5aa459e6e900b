"""`rankscope dashboard`: serve live pages of the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import echo, fail

__all__ = ["EPILOG", "dashboard"]

EPILOG = (
    "\b\nExamples:\nrankscope dashboard\nrankscope dashboard runs/\n"
    "rankscope dashboard runs/latest --port 8600\nrankscope dashboard --port 0\n"
    "rankscope dashboard s3://lake/rankscope/run-7\nrankscope dashboard s3://lake/rankscope"
)


def dashboard(
    runs: Annotated[
        Path, typer.Argument(help="Folder of runs, one run, or the address of either.", metavar="[RUNS_DIR]")
    ] = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any free one.")] = 8501,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="Ask visitors for the token in this file.")
    ] = None,
) -> None:
    """Show runs in the browser, while they train and after they end.

    It listens on 127.0.0.1 only and opens the run given, or the table of all runs. From another machine:
    ssh -L 8501:127.0.0.1:8501 HOST. On a machine with other users: --token-file (mode 0600).
    """
    from contextlib import ExitStack

    from dashboard.launch import DashboardError, DashboardServer
    from store import StoreError
    from store.open import classify
    from store.published.address import AddressError

    address = classify(runs).address
    try:
        with ExitStack() as stack:
            if address:
                from watch.sharing.followed import followed

                runs = stack.enter_context(followed(address, report=_report))
            server = stack.enter_context(DashboardServer(runs, port=port, token_file=token_file))
            echo(f"Dashboard of {address or runs}: {server.url}   (Ctrl-C ends it)")
            if classify(runs).kind == "files":
                echo(f"There is no run in {runs} yet: the first one appears as soon as it begins.")
            code = server.wait()
    except (DashboardError, AddressError, StoreError) as error:
        fail(str(error))
    raise typer.Exit(code)


def _report(problem: str) -> None:
    echo(f"rankscope: {problem}", err=True)
