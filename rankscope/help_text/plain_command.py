"""`--help` of the commands: names on the left, wrapped text on the right, examples that can be copied unchanged.

    app.command(cls=PlainCommand, epilog="\b\nExamples:\nrankscope top runs/latest")(top)

Typer's panels cut long names, and show types (`<list[Path]>`) where a reader needs an example.
"""

from __future__ import annotations

import inspect
import math
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["PlainCommand", "PlainGroup", "placeholder"]

MAX_WIDTH = 100
"""Maximum line width: longer lines are hard to read even on a wide terminal."""
MAX_NAMES = 30
"""Width of the column of names; a longer name gets a separate line."""
_VALUES = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER"}


class PlainCommand(TyperCommand):
    """A command that refuses infinite numbers and empty paths. Its help fits 60 or more columns."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line. Raises BadParameter for a number that is infinite, such as 1e999, and
        for an empty path (an unset variable), which would mean the current folder.
        """
        typed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        param: Any
        for param in self.get_params(ctx):
            value = ctx.params.get(param.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter("must be a finite number", ctx=ctx, param=param)
            values, words = (
                [one] if not isinstance(one, (list, tuple)) else one for one in (value, typed.get(param.name))
            )
            if "" in words and any(isinstance(one, Path) for one in values):
                raise typer.BadParameter("is empty; name a path", ctx=ctx, param=param)
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, text, arguments, options, examples."""
        formatter.write("\n".join(_command_lines(self, ctx, _width())) + "\n")


class PlainGroup(TyperGroup):
    """The list of all commands, in their groups."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, text, the commands by group, options."""
        formatter.write("\n".join(_group_lines(self, ctx, _width())) + "\n")


def _width() -> int:
    return min(MAX_WIDTH, max(40, shutil.get_terminal_size((80, 24)).columns))


def _command_lines(command: Any, ctx: Any, width: int) -> Iterator[str]:
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name == "option"]
    words = ["[OPTIONS]", *(_argument(param) for param in arguments)]
    yield from textwrap.wrap(f"Usage: {ctx.command_path} {' '.join(words)}", width, subsequent_indent="  ")
    yield from _paragraphs(command.help, width)
    yield from _table("Arguments", [(_argument(param), param.help or "") for param in arguments], width)
    yield from _table("Options", [(_option(param, ctx), _text(param, ctx)) for param in options], width)
    if command.epilog:
        heading, *examples = inspect.cleandoc(command.epilog.replace("\b", "")).strip().splitlines()
        yield ""
        yield typer.style(heading, bold=True)
        for example in examples:
            yield from _example_lines(example, width)


def _group_lines(group: Any, ctx: Any, width: int) -> Iterator[str]:
    yield f"Usage: {ctx.command_path} COMMAND [OPTIONS]"
    yield from _paragraphs(group.help, width)
    panels: dict[str, list[tuple[str, str]]] = {}
    for name, command in group.commands.items():
        first = inspect.cleandoc(command.help or "").split("\n\n")[0]
        panels.setdefault(command.rich_help_panel or "Commands", []).append((name, _one_line(first)))
    left = max(len(name) for rows in panels.values() for name, _ in rows)
    for heading, rows in panels.items():
        yield from _table(heading, rows, width, left=left)
    options = [param for param in group.get_params(ctx) if param.param_type_name == "option"]
    yield from _table("Options", [(_option(param, ctx), _text(param, ctx)) for param in options], width)


def _example_lines(example: str, width: int) -> Iterator[str]:
    """The command, split with backslashes, because a terminal would break it within a word."""
    line = " "
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", example):
        if line.strip() and len(line) + 1 + len(word) > width - 2:
            yield f"{line} \\"
            line = "     "
        line += f" {word}"
    yield line


def _paragraphs(text: str | None, width: int) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        yield ""
        yield from textwrap.wrap(_one_line(paragraph), width, break_on_hyphens=False)


def _table(heading: str, rows: Sequence[tuple[str, str]], width: int, *, left: int = 0) -> Iterator[str]:
    if not rows:
        return
    left = left or max((len(name) for name, _ in rows if len(name) <= MAX_NAMES), default=MAX_NAMES)
    yield ""
    yield typer.style(heading, bold=True)
    for name, text in rows:
        lines = textwrap.wrap(text, width - left - 4, break_on_hyphens=False, break_long_words=False) or [""]
        if len(name) > left:
            yield f"  {name}"
        else:
            yield f"  {name:<{left}}  {lines.pop(0)}".rstrip()
        yield from (" " * (left + 4) + line for line in lines)


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    more = "..." if param.nargs != 1 and not name.endswith("...") else ""
    return f"{name}{more}" if param.required or name.startswith("[") else f"[{name}]{more}"


def _option(param: Any, ctx: Any) -> str:
    names = ", ".join((*param.opts, *param.secondary_opts))
    return names if param.is_flag else f"{names} {placeholder(param, ctx)}"


def placeholder(param: Any, ctx: Any) -> str:
    """Placeholder of an option's value in the help."""
    if param.metavar:
        return str(param.metavar)
    choices = _choices(param, ctx)
    if choices:
        joined = "|".join(choices)
        return joined if len(joined) <= MAX_NAMES else "NAME"
    return _VALUES.get(_type(param, ctx), "TEXT")


def _choices(param: Any, ctx: Any) -> list[str]:
    shown = _type(param, ctx)
    return shown.split("|") if "|" in shown else []


def _type(param: Any, ctx: Any) -> str:
    """The type as Typer shows it, without brackets."""
    return str(param.display_type_rich(ctx=ctx) or "").strip("<>")


def _text(param: Any, ctx: Any) -> str:
    """The help of an option, with the default value if the option has one."""
    text = _one_line(param.help or "")
    choices = [] if param.metavar else _choices(param, ctx)
    if choices and placeholder(param, ctx) == "NAME":
        text = f"{text} One of {', '.join(choices)}."
    default = param.default
    is_named = isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != ""
    if param.is_flag or not is_named or not param.show_default or "efault" in text:
        return text
    return f"{text} [default: {default}]"


def _one_line(text: str) -> str:
    return " ".join(text.split())
