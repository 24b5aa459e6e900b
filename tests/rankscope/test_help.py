"""Help of the commands: every example is a line of its own, also of the benchmarks."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from rankscope import cli
from rankscope.cli import app
from tests.depth import later

ROOT = Path(__file__).parents[2]
COMMANDS = {name: one for name, one in typer.main.get_command(app).commands.items() if one.epilog}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["analyze", "run", "rebuild"])
def test_each_example_is_what_a_shell_takes_as_one_line(name: str) -> None:
    printed = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).stdout
    lines = [" ".join(line.split()) for line in printed.replace("\\\n", " ").splitlines()]
    for example in COMMANDS[name].epilog.splitlines()[1:]:
        assert example in lines


def test_a_command_is_made_without_the_others() -> None:
    """To make the options of all takes as long as the rest of a short command."""
    assert [*cli._entry("sql").commands] == ["sql"]  # type: ignore[attr-defined]
    for word in ("--help", "anlyze"):  # of which all are listed, or the nearest one named
        assert cli._entry(word).commands.keys() >= COMMANDS.keys()  # type: ignore[attr-defined]


def test_examples_begin_with_a_heading_and_are_commands() -> None:
    assert len(COMMANDS) > 20
    for name, command in COMMANDS.items():
        mark, heading, *examples = command.epilog.splitlines()
        assert (mark, heading) in (("\b", "Examples:"), ("\b", "Example:")), name
        assert examples, name
        assert all("rankscope " in one for one in examples), name


def test_no_message_sends_a_reader_to_a_file_that_only_a_clone_has() -> None:
    """Generators of those files excepted. Docstrings of commands are their help."""
    found = []
    for package in ("rankscope", "dashboard", "analyzers", "watch", "trainer", "store", "probes"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "docs/" not in text:
                continue
            tree = ast.parse(text)
            bodies = [] if path.parent.name == "commands" else [
                node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            ]  # fmt: skip
            own_lines = {id(one.value) for node in bodies for one in node.body if isinstance(one, ast.Expr)}
            found += [
                f"{path.relative_to(ROOT)}: {node.value[:80]}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own_lines
                and re.search(r"(?<!> )docs/[a-z-]+\.md", node.value)
            ]  # fmt: skip
    assert found == []


def test_a_parser_that_shows_a_docstring_keeps_its_lines() -> None:
    joined = [
        str(path.relative_to(ROOT))
        for folder in ("benchmarks", "watch", "trainer", "dashboard")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"ArgumentParser\([^)]*description=__doc__(?![ .]|[^)]*formatter_class)", path.read_text())
    ]
    assert joined == []


def test_rankscope_without_arguments_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rankscope"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    named = [line.split()[1] for line in lines if line.startswith("  rankscope ")]
    assert len(named) >= 5
    assert set(named) <= COMMANDS.keys()


@pytest.mark.parametrize("columns", [60, pytest.param(80, marks=later("in sixty columns"))])
def test_help_fits_the_terminal_and_shows_no_type_of_python(columns: int) -> None:
    runner = CliRunner()
    for words in ([], *([name] for name in typer.main.get_command(app).commands)):  # type: ignore[attr-defined]
        printed = runner.invoke(app, [*words, "--help"], env={"COLUMNS": str(columns), "NO_COLOR": "1"}).stdout
        assert max(map(len, printed.splitlines())) <= columns, (words, printed)
        assert not re.search(r"<(str|int|bool|path|list)|…", printed, re.IGNORECASE), words


def test_commands_are_in_five_groups() -> None:
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    assert len({command.rich_help_panel for command in commands}) == 5


def test_the_page_of_commands_shows_the_placeholders_of_the_help() -> None:
    """An option without a default was TEXT on the page, whatever its type: `--gpus TEXT` for `--gpus N`."""
    runner = CliRunner()
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        name = section.split("\n", 1)[0]
        printed = runner.invoke(app, [name, "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}).stdout
        for option in re.findall(r"(?m)^- `(--[^` ]+ [^`]+)`", section):
            assert option in printed, (name, option)
