"""The command line: all commands, in the groups in which `rankscope --help` lists them.

    rankscope train examples/gpt-demo.toml --set train.steps=100
    rankscope analyze runs/latest

Each command imports what it needs when it runs, so `rankscope analyze` starts without torch and streamlit.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Annotated, Any

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
from rankscope.help_text.plain_command import PlainCommand, PlainGroup
from rankscope.process_end.end_signals import run_to_signal
from rankscope.process_end.lost_output import EXIT_LOST_OUTPUT, lost_output, reopen_closed_streams

__all__ = ["app", "main"]

app = typer.Typer(
    name="rankscope",
    cls=PlainGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_GROUPS: dict[str, tuple[ModuleType, ...]] = {
    "Train": (demo, train, run, plan, prepare, preflight, drill),
    "Watch": (dashboard, top, watch, sql, mcp),
    "Understand": (analyze, explain, compare, fleet, profile, replay),
    "Keep and share": (report, share, export, note, rebuild, collect),
    "Jobs and machines": (collect_evidence, stacks, dumps, doctor, version),
}
"""The commands as `rankscope --help` lists them."""
for _group, _commands in _GROUPS.items():
    for _command in _commands:
        _name = _command.__name__.rpartition(".")[2]
        app.command(
            _name.replace("_", "-"), cls=PlainCommand, rich_help_panel=_group, epilog=getattr(_command, "EPILOG", None),
            context_settings=getattr(_command, "CONTEXT", None),
        )(getattr(_command, _name))  # fmt: skip


START = """\
Train with telemetry on every rank, find the faulty one, and recover the run.

  rankscope demo                a small GPT on four CPU ranks, with two faults
  rankscope run train.py        your script, launched as by torchrun
  rankscope train CONFIG.toml   a GPT or Llama over several ranks
  rankscope analyze PATH...     what went wrong: a run, logs, dumps, traces
  rankscope dashboard           runs in the browser, live or ended
  rankscope top RUN             the ranks of a run in the terminal
  rankscope explain             what a finding means, and what to do

All commands: rankscope --help. One command: rankscope run --help.
"""
"""Printed for `rankscope` without arguments: the first commands to use, on one screen of a terminal."""
_EXTRAS = {"torch": "train", "safetensors": "train", "fsspec": "train", "streamlit": "dashboard"}
"""Packages that only some commands need, and the extra that installs them."""
_OWN = ("", "rankscope", "probes", "store", "analyzers", "watch", "trainer", "dashboard")
"""A failing import of one of these packages is a bug, so its traceback is shown."""


def main() -> None:
    """Entry point of the `rankscope` command. A usage error prints one line to stderr and exits with code 2."""
    reopen_closed_streams()
    try:
        words = sys.argv[1:]
        if words:
            code = run_to_signal(lambda: _entry(words[0])(words, standalone_mode=False))
        else:
            sys.stdout.write(START)
            code = 0
    except TyperException as error:
        if message := error.format_message():
            setting = _setting(error)  # replaces the list of similar options
            message = message.partition(" (Possible options")[0] if setting else message
            from probes.settings.plain_errors import in_words  # after `rankscope.commands` has claimed the names
            from probes.tape.redaction.printable import visible

            whole = _sentence(in_words(message.rstrip(". ")) + _example(error) + setting)
            sys.stderr.write(f"rankscope: {visible(whole)} See {_help_of(error)}\n")
        code = error.exit_code
    except typer.Abort:
        code = 1
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OWN:
            raise
        sys.stderr.write(f"rankscope: {_import_problem(package, error)}\n")
        code = 2
    except SystemExit as end:  # typer and rich end a command like this if its reader closes the pipe (`| head`)
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = 128 + signal.SIGPIPE
    except OSError as error:
        if problem := lost_output(error):
            code = _report_lost_output(problem)
        elif isinstance(error, FileNotFoundError) and not _has_folder():
            sys.stderr.write("rankscope: the current folder was deleted: cd to another one\n")
            code = 2
        else:
            raise
    if problem := lost_output():
        code = _report_lost_output(problem)
    sys.exit(code)


@functools.cache
def _entry(name: str) -> Callable[..., Any]:
    """Build only the named command, because building all of them takes longer than running most. Builds all if no
    command has this name.
    """
    chosen = copy.copy(app)
    chosen.registered_commands = [c for c in app.registered_commands if c.name == name] or app.registered_commands
    return typer.main.get_command(chosen)


def _has_folder() -> bool:
    """Return False if the current folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _report_lost_output(problem: str) -> int:
    sys.stderr.write(f"rankscope: standard output: {problem}. Not everything was written.\n")
    return EXIT_LOST_OUTPUT


def _import_problem(package: str, error: ImportError) -> str:
    """Message with the package that is missing or broken, and how to install it."""
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(package)):
        return f"this command needs {error.name}: pip install 'rankscope[{extra}]'"
    reason = " ".join(str(error).split())
    return f"{package} cannot be imported ({reason}): pip install --force-reinstall rankscope"


def _help_of(error: TyperException) -> str:
    """The command with the help that explains the mistake."""
    context = getattr(error, "ctx", None)
    if context is not None:
        return f"`{context.command_path} --help`"
    named = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    names = {command.name for command in app.registered_commands}
    return f"`rankscope {named} --help`" if named in names else "`rankscope --help`"


def _example(error: TyperException) -> str:
    """The first example of the command, if an argument or option is missing."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ != "MissingParameter" or context is None:
        return ""
    _, _, examples = (context.command.epilog or "").partition("Examples:\n")
    first = examples.partition("\n")[0].strip()
    return f", for example `{first}`" if first else ""


def _setting(error: TyperException) -> str:
    """Return the `--set` form of a setting that was typed as an option; empty for anything else."""
    name = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    context = getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or context is None:
        return ""
    if not any("--set" in parameter.opts for parameter in context.command.params):
        return ""
    from trainer.config.config import Config

    section = next((key for key, field in Config.model_fields.items() if name in _keys(field.annotation)), "")
    return f". A setting is given as --set {section}.{name}=VALUE" if section else ""


def _keys(section: Any) -> Collection[str]:
    return getattr(section, "model_fields", ())


def _sentence(message: str) -> str:
    """Return the message on one line, with a full stop."""
    text = " ".join(message.split()).replace(": Value error, ", ": ")
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
