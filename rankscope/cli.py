"""The command line: all commands, in the order in which `rankscope --help` lists them.

    rankscope train examples/gpt-demo.toml --set train.steps=100
    rankscope analyze runs/latest

Each command imports what it needs when it runs, so `rankscope analyze` starts without torch and streamlit.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from rankscope.commands import (
    analyze,
    collect,
    collect_evidence,
    compare,
    dashboard,
    demo,
    doctor,
    drill,
    dumps,
    explain,
    export,
    fleet,
    mcp,
    note,
    plan,
    preflight,
    prepare,
    profile,
    rebuild,
    replay,
    report,
    run,
    share,
    sql,
    stacks,
    top,
    train,
    version,
    watch,
)
from rankscope.process_end.end_signals import run_to_signal
from rankscope.process_end.lost_output import EXIT_LOST_OUTPUT, lost_output

__all__ = ["app", "main"]

app = typer.Typer(
    name="rankscope",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command(epilog=demo.EPILOG)(demo.demo)
app.command(epilog=train.EPILOG)(train.train)
app.command(epilog=run.EPILOG, context_settings=run.CONTEXT)(run.run)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=prepare.EPILOG)(prepare.prepare)
app.command(epilog=preflight.EPILOG)(preflight.preflight)
app.command(epilog=analyze.EPILOG)(analyze.analyze)
app.command(epilog=explain.EPILOG)(explain.explain)
app.command(epilog=profile.EPILOG)(profile.profile)
app.command(epilog=replay.EPILOG)(replay.replay)
app.command(epilog=drill.EPILOG)(drill.drill)
app.command(epilog=dashboard.EPILOG)(dashboard.dashboard)
app.command(epilog=top.EPILOG)(top.top)
app.command(epilog=sql.EPILOG)(sql.sql)
app.command(epilog=mcp.EPILOG)(mcp.mcp)
app.command(epilog=report.EPILOG)(report.report)
app.command(epilog=share.EPILOG)(share.share)
app.command(epilog=export.EPILOG)(export.export)
app.command(epilog=compare.EPILOG)(compare.compare)
app.command(epilog=fleet.EPILOG)(fleet.fleet)
app.command(epilog=note.EPILOG)(note.note)
app.command(epilog=rebuild.EPILOG)(rebuild.rebuild)
app.command(epilog=collect.EPILOG)(collect.collect)
app.command(epilog=watch.EPILOG)(watch.watch)
app.command("collect-evidence", epilog=collect_evidence.EPILOG)(collect_evidence.collect_evidence)
app.command(epilog=stacks.EPILOG)(stacks.stacks)
app.command(epilog=dumps.EPILOG)(dumps.dumps)
app.command(epilog=doctor.EPILOG)(doctor.doctor)
app.command()(version.version)


_EXTRAS = {"torch": "train", "safetensors": "train", "fsspec": "train", "streamlit": "dashboard"}
"""Packages that only some commands need, and the extra that installs them."""


_OWN = ("", "rankscope", "probes", "store", "analyzers", "watch", "trainer", "dashboard")
"""A failing import of one of these is an error of ours, and its traceback says where."""


def main() -> None:
    """Entry of the `rankscope` command. A mistake on the command line is one line on stderr and exit code 2."""
    try:
        code = run_to_signal(lambda: app(standalone_mode=False))
    except TyperException as error:
        if message := error.format_message():
            from analyzers.printable import visible  # after `rankscope.commands` has claimed the names

            sys.stderr.write(f"rankscope: {visible(_sentence(message))} See {_help_of(error)}\n")
        code = error.exit_code
    except typer.Abort:
        code = 1
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OWN:
            raise
        sys.stderr.write(f"rankscope: {_import_problem(package, error)}\n")
        code = 2
    except OSError as error:
        if not (problem := lost_output(error)):
            raise
        code = _report_lost_output(problem)
    if problem := lost_output():
        code = _report_lost_output(problem)
    sys.exit(code)


def _report_lost_output(problem: str) -> int:
    sys.stderr.write(f"rankscope: standard output: {problem}. Not everything was written.\n")
    return EXIT_LOST_OUTPUT


def _import_problem(package: str, error: ImportError) -> str:
    """Name the package that is missing or broken, and how to install it."""
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(package)):
        return f"this command needs {error.name}: pip install 'rankscope[{extra}]'"
    reason = " ".join(str(error).split())
    return f"{package} cannot be imported ({reason}): pip install --force-reinstall rankscope"


def _help_of(error: TyperException) -> str:
    """The command whose help explains the mistake."""
    context = getattr(error, "ctx", None)
    return f"`{context.command_path} --help`" if context is not None else "`rankscope --help`"


def _sentence(message: str) -> str:
    """The message on one line, with a full stop."""
    text = " ".join(message.split())
    return text if text.endswith((".", "?")) else f"{text}."


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version.version()
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train with telemetry on every rank, find the faulty one, and recover the run."""
