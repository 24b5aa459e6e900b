"""Commands on a run whose names and texts are escape sequences: none reaches a terminal or the name of a file."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException
from typer.testing import CliRunner

import rankscope.commands
from analyzers.report.terminal.safe_console import SafeConsole
from rankscope.cli import app
from tests.analyzers.report.hostile import TEXTS, hostile_run

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
NAME = "x\x1b]0;owned\x07\u202ey"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hostile run in a folder of a hostile name, with a log of a hostile name."""
    made = hostile_run(tmp_path_factory.mktemp("hostile"))
    (made.path / "logs").mkdir(exist_ok=True)
    (made.path / "logs" / "\x1b[2J.log").write_text("\x1b[2J")
    (made.path / "stacks" / "rank-00001.txt").write_text('File "\x1b[31m.py", line 1 in \u202ef\n')
    return made.path.rename(made.path.parent / NAME)


COMMANDS = [
    ["analyze", "RUN"],
    ["analyze", "RUN", "--format", "json"],
    ["analyze", "FOLDER"],
    ["report", "RUN", "--html", "r.html", "--markdown", "r.md", "--chrome-trace", "t.json"],
    ["compare", "RUN", "COPY"],
    ["sql", "RUN", "FROM events"],
    ["sql", "RUN", "FROM events", "--format", "csv"],
    ["sql", "RUN", 'SELECT 1 AS "a\x1b[2J"', "--format", "json"],
    ["sql", "RUN", "--tables"],
    ["top", "RUN", "--once"],
    ["fleet", "FOLDER"],
    ["share", "RUN"],
    ["collect", "RUN", "--into", "collected"],
    ["export", "RUN", "--to", "parquet", "--out", "parquet"],
    ["export", "RUN", "--to", "chrome-trace", "--out", "c.json"],
]
REFUSED = [
    ["analyze", "RUN/none\x1b[2J"],
    ["sql", "RUN", "\x1b[2J"],
    ["export", "RUN"],
    ["replay", "RUN", "--step", "20"],
    ["train", "--resume", "RUN"],
    ["train", "--set", "run.name=\x1b[2J\u202e", "--set", "model.\x1b[2J=1"],
]


@pytest.mark.parametrize("words", COMMANDS + REFUSED, ids=lambda words: "-".join(words[:1] + words[3:4]))
def test_no_command_passes_a_control_character(
    run: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = run.parent.parent / "copies" / run.name
    if "COPY" in words:
        shutil.copytree(run, copy)
    places = {"RUN": run, "FOLDER": run.parent, "COPY": copy}
    given = [re.sub("|".join(places), lambda found: str(places[found[0]]), word) for word in words]
    done = CliRunner().invoke(app, given)
    assert done.exception is None or isinstance(done.exception, (SystemExit, TyperException)), repr(done.exception)
    assert not CONTROL.search(done.output.replace("\n", "").replace("\r", "")), done.output[:2000]
    assert (done.exit_code != 0) is (words in REFUSED), done.output[:2000]
    odd = [path for path in tmp_path.rglob("*") if not str(path.relative_to(tmp_path)).isprintable()]
    assert odd == [], "names of files that the command wrote"


def test_a_terminal_gets_colours_and_nothing_else() -> None:
    screen = io.StringIO()
    console = SafeConsole(file=screen, force_terminal=True, color_system="truecolor", width=80)
    for text in TEXTS:
        table = Table(text[:40])
        table.add_row(Text(text[:2000], style="red"))
        console.print(text[:2000], markup=False, highlight=False, style="bold")
        console.print(table)
    shown = COLOUR.sub("", screen.getvalue())
    assert not CONTROL.search(shown.replace("\n", ""))
    assert COLOUR.search(screen.getvalue())


def test_commands_print_through_one_place() -> None:
    """`rankscope.terminal.echo`, `fail` and `console`: nothing else reaches the terminal."""
    direct = re.compile(r"typer\.echo\(|(?<![\w.])print\(|sys\.stdout\.write\(|(?<![\w])Console\(")
    for path in Path(rankscope.commands.__path__[0]).glob("*.py"):
        assert not direct.search(path.read_text()), path.name
