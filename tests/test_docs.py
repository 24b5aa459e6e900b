"""Links, anchors, commands and `make` targets in the documents exist.

Run it alone with `make docs-check`.
"""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankscope.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", flags=re.MULTILINE)
EXPLICIT_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
FENCE = re.compile(r"^(```|~~~).*?^\1", flags=re.MULTILINE | re.DOTALL)
MAKE_COMMAND = re.compile(r"(?:^ {4,}|^\$ |`)make ([a-z][a-z-]*)", flags=re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """The anchors of a page on a forge: explicit ones, and the slug of each heading."""
    text = FENCE.sub("", text)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}
    return slugs | set(EXPLICIT_ANCHOR.findall(text))


def broken_links(document: Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        has_anchor = anchor and target.suffix == ".md" and target.exists()
        if not target.exists() or (has_anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(MAKE_COMMAND.findall(document.read_text(encoding="utf-8"))) <= targets


COMMAND = re.compile(r"^ {4,}(rankscope .*?)(?:\s{2,}#.*)?$", flags=re.MULTILINE)


@functools.cache
def help_of(name: str) -> str:
    """Help of a command, which many documents name."""
    helped = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert helped.exit_code == 0, name
    return helped.output


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_and_their_options_exist(document: Path) -> None:
    for command in COMMAND.findall(document.read_text(encoding="utf-8")):
        words = shlex.split(command)[1:]
        helped = help_of(words[0])
        for option in (word for word in words if word.startswith("--")):
            assert option in helped, command


def test_the_readme_shows_commands() -> None:
    assert len(COMMAND.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 5


def test_anchors_of_headings() -> None:
    text = '# Why: a rank\'s "bubble"\n\n<a id="straggler-compute"></a>\n```\n# not a heading\n```\n'
    assert anchors_of(text) == {"why-a-ranks-bubble", "straggler-compute"}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("## One\n")
    document = tmp_path / "here.md"
    document.write_text(
        "[a](there.md#one) [b](there.md#two) [c](gone.md) [d](https://example.org) [e](#here)\n# Here\n"
    )
    assert broken_links(document) == ["there.md#two", "gone.md"]


def test_the_table_of_places_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("Where is ...") : text.index("Follow one record")]
    places = re.findall(r"`([a-z_]+/[a-z_/.]*)`", table)
    assert len(places) >= 12
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_the_tests_that_the_page_on_gpus_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "gpu.md").read_text()))
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named
    assert named <= defined
