"""`rankscope mcp`: the runs of a folder for agents on call, over the Model Context Protocol."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from rankscope.terminal import fail, refuse_no_runs_folder

__all__ = ["EPILOG", "mcp"]

EPILOG = "\b\nExamples:\nrankscope mcp runs/\nrankscope mcp runs/ --port 8765"


def mcp(
    runs: Annotated[Path, typer.Argument(help="Folder of runs.", metavar="[RUNS_DIR]")] = Path("runs"),
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65535, help="Serve HTTP on this port of 127.0.0.1; 0: use standard input."),
    ] = 0,
) -> None:
    """Answer an agent's questions about runs: verdict, findings, account, SQL, stacks, comparison, runbook.

    It reads only this folder, and writes only into the runs' stores. It uses standard input and output, or HTTP with
    --port.
    """
    import importlib.util

    refuse_no_runs_folder(runs)
    if importlib.util.find_spec("mcp") is None:
        fail("the package mcp is not installed: pip install 'rankscope[mcp]'")
    from rankscope.mcp_server import make_server

    server = make_server(runs)
    if port:
        try:
            server.run("streamable-http", host="127.0.0.1", port=port)
        except SystemExit:  # uvicorn exits like this if it could not start
            fail(f"cannot listen on 127.0.0.1:{port}: choose another --port")
    else:
        _end_on_signals()
        server.run("stdio")


def _end_on_signals() -> None:
    """Exit immediately on a signal: otherwise Python would wait for the thread that reads standard input, which nothing
    wakes up.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, frame: os._exit(128 + received))
