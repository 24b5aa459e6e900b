"""`rankscope demo`: train a small model with two faults, recover, and explain both."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from probes.tape.typed_path import analyze_command
from rankscope import __version__
from rankscope.terminal import console, echo, fail

__all__ = ["EPILOG", "FAULTS", "demo"]

EPILOG = "\b\nExamples:\nrankscope demo\nrankscope demo --no-dashboard\nrankscope demo --runs-dir /tmp/runs"
FAULTS = ("nan_grad@step=40,rank=2", "slow_compute@step=60,rank=3,factor=1.5")


def demo(
    runs_dir: Annotated[Path, typer.Option("--runs-dir", metavar="FOLDER", help="Folder for the run.")] = Path("runs"),
    dashboard: Annotated[
        bool | None,
        typer.Option("--dashboard/--no-dashboard", help="Serve the pages until Ctrl-C. Default: on a terminal."),
    ] = None,
) -> None:
    """Train a small GPT on four CPU ranks with two faults, recover, explain both, and show the pages. Takes a minute.

    Rank 2 gets a NaN gradient at step 40; rank 3 computes 1.5 times as long from step 60 on.
    """
    from trainer.launcher.processes.zygote import one_thread

    with one_thread():  # ranks are forked from here
        from probes.tape.rundir import RunError
        from trainer.config.load import ConfigError
        from trainer.launcher.start import Options, launch_run
        from trainer.presets import config_path

    has_pages = importlib.util.find_spec("streamlit") is not None
    serve = has_pages and (sys.stdout.isatty() if dashboard is None else dashboard)
    screen = console()
    for line in ("$ rankscope train gpt-demo \\", f"    --fault {FAULTS[0]} \\", f"    --fault {FAULTS[1]}"):
        screen.print(line, style="bold", highlight=False, markup=False, soft_wrap=True)
    options = Options(config_path=config_path("gpt-demo"), overrides=[f"run.dir={runs_dir}"], faults=list(FAULTS))
    try:
        code = launch_run(options, version=__version__, console=screen)
    except (ConfigError, RunError) as error:
        fail(str(error))
    if code:
        raise typer.Exit(code)
    run = runs_dir / "latest"
    port = _port_of_links() if serve else 0
    screen.print(f"\n$ {analyze_command(run)}", style="bold", highlight=False, markup=False, soft_wrap=True)
    from rankscope.commands.analyze import analyze

    analyze([run], output="text", fail_on="", why_spike="")
    _show_pages(runs_dir, has_pages=has_pages, serve=serve, port=port)


def _port_of_links() -> int:
    """The dashboard's future port, which the links in the printed report use."""
    from dashboard.launch import LOOPBACK, usable_port

    port = usable_port()
    os.environ.setdefault("RANKSCOPE_DASHBOARD_URL", f"http://{LOOPBACK}:{port}")
    return port


def _show_pages(runs_dir: Path, *, has_pages: bool, serve: bool, port: int) -> None:
    """Serve the dashboard until Ctrl-C, or print the command for it."""
    command = f"rankscope dashboard {shlex.quote(str(runs_dir))}"
    if not has_pages:
        echo("\nPages in the browser: pip install 'rankscope[dashboard]', then " + command)
    elif serve:
        from dashboard.launch import DashboardError, DashboardServer

        try:
            with DashboardServer(runs_dir, port=port) as server:
                echo(f"\nPages of this run: {server.url}   (Ctrl-C ends it)")
                server.wait()
        except DashboardError as error:
            fail(str(error))
        except KeyboardInterrupt:
            # The server has ended. An interpreter that has launched ranks takes long to exit, and has been seen to
            # hang.
            sys.stdout.flush()
            os._exit(0)
    else:
        echo(f"\nPages in the browser: {command}")
