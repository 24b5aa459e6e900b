"""The first screen of README, index and quickstart: an install line, a command, a verdict; and that they are true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from rankscope.cli import app

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/index.md", "docs/quickstart.md")
SCREEN = 24
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
NEEDS = re.compile(r"(?m)^\| `(\w+)`[^|]*\| ([^|]*) \|$")
"""A row of the table of extras: the first one's name, and what it is for."""


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_first_screen_installs_runs_and_shows_a_verdict(page: str) -> None:
    screen = "\n".join(text_of(page).splitlines()[:SCREEN])
    (extras,) = re.findall(r"pip install 'rankscope\[([\w,]+)\]'", screen)
    assert set(extras.split(",")) <= set(EXTRAS)
    assert "    rankscope demo" in screen
    assert "    Verdict   " in screen


def test_the_verdict_is_the_one_that_the_demo_printed() -> None:
    whole = text_of("docs/quickstart.md").split("## The demo")[1]
    for page in PAGES:
        verdict = re.search(r"(?m)^    Verdict .*\n(?:     {10}.*\n)+", text_of(page))
        assert verdict
        assert verdict[0] in whole, page


@pytest.mark.parametrize("page", ["README.md"])
def test_commands_that_need_an_extra_are_those_that_are_named(page: str) -> None:
    found = {extra: re.findall(r"`(?:rankscope )?([\w-]+)`", what) for extra, what in NEEDS.findall(text_of(page))}
    assert {"train", "dashboard", "mcp", "stacks"} <= set(found) <= set(EXTRAS)
    assert set(found["train"]) == {"train", "demo", "drill"}
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for names in found.values():
        assert set(names) <= set(commands)


def test_the_dashboard_opens_on_what_its_help_says() -> None:
    help_text = " ".join(get_command(app).commands["dashboard"].help.split())  # type: ignore[attr-defined]
    assert "opens the run given, or the table of all runs" in help_text
    assert 'default=title == "Runs"' in (ROOT / "dashboard" / "navigation.py").read_text(encoding="utf-8")
