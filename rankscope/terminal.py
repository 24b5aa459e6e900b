"""Shared by all commands: the run argument, the console, and the exit on a user's error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "LONGEST_S", "FormatOption", "RunArgument", "console", "echo", "fail", "print_json", "refuse_bad_output",
    "refuse_no_runs_folder", "wants_json",
]  # fmt: skip

LONGEST_S = 366 * 86_400.0
"""Largest number of seconds that an option takes: no wait of the system can be infinite."""
RunArgument = Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/latest.", metavar="RUN")]
FormatOption = Annotated[str, typer.Option("--format", help="Output: text or json.", metavar="text|json")]
"""The option `--format`, for commands with output that programs read, too."""


def fail(message: str) -> NoReturn:
    """Exit with code 2 and one line on stderr: what is wrong, where, and what to do."""
    echo(f"rankscope: {message}", err=True)
    raise typer.Exit(2)


def refuse_bad_output(option: str, path: Path | None) -> None:
    """Exit with code 2 if an output file is a folder, or its folder does not exist (a misspelt one must not be created
    silently).
    """
    if path is not None and not path.parent.is_dir():
        fail(f"{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        fail(f"{option} {path}: is a folder; name a file")


def refuse_no_runs_folder(path: Path) -> None:
    """Exit with code 2 unless the path is a folder that may hold runs: it exists, and is not a run itself."""
    from probes.tape.no_run import no_folder
    from probes.tape.rundir import RunDir
    from probes.tape.typed_path import as_typed

    if not path.is_dir():
        fail(no_folder(path))
    if RunDir.is_run(path):
        fail(f"{path} is a run: name the folder that holds the runs, {as_typed(path.resolve().parent)}")


def print_json(value: object) -> None:
    """Print one JSON document, for programs."""
    import json

    echo(json.dumps(value, indent=2))


def echo(text: object = "", *, err: bool = False) -> None:
    """Print a text without control characters, to stdout or stderr."""
    from probes.tape.redaction.printable import visible_lines

    typer.echo(visible_lines(str(text)), err=err)


def console(*, err: bool = False) -> Console:
    """Return a console with the terminal's colours and width, or plain text of a fixed width for pipes and files.

    `err`: write to stderr. This is for progress messages of a command that prints a document to stdout.
    """
    from analyzers.report.terminal.safe_console import SafeConsole

    terminal = SafeConsole(stderr=err)
    return terminal if terminal.is_terminal else SafeConsole(width=110, no_color=True, stderr=err)


def wants_json(output: str) -> bool:
    """Return True for `--format json`. Exits with code 2 for an unknown format."""
    if output not in ("text", "json"):
        fail(f"--format {output}: choose text or json")
    return output == "json"
