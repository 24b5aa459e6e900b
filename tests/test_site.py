"""The documentation site: built with warnings as errors, complete, searchable, and without a request to elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope import commands_page
from trainer.config import settings_page

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"<(?:script|img|iframe|link)[^>]*(?:src|href)=\"?(https?:)?//", flags=re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; mkdocs ends with an error at its first warning (`strict` in mkdocs.yml)."""
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(place)], cwd=ROOT, capture_output=True,
        text=True, timeout=100, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return place


def test_every_document_is_a_page_and_can_be_searched(site: Path) -> None:
    documents = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert documents | {"contributing.html", "changelog.html"} <= pages
    found = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    searched = {entry["location"].partition("#")[0] for entry in found["docs"]}
    assert documents <= searched
    assert (site / "search" / "search_index.js").exists(), "the search of pages opened from a disk"


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = re.sub(r"<link rel=\"?canonical[^>]*>", "", path.read_text(encoding="utf-8"))
        assert not LOADED.search(text), (path.name, LOADED.search(text))
    assert (site / "site" / "iframe-worker.js").exists()


def test_links_out_of_the_folder_lead_to_pages_or_name_the_file(site: Path) -> None:
    text = (site / "testing.html").read_text(encoding="utf-8")
    assert 'href="contributing.html#rules-that-a-test-keeps"' in text
    for path in site.rglob("*.html"):
        assert not re.search(r'href="(?:\.\./)+(?:README|CONTRIBUTING|examples|analyzers)', path.read_text()), path.name


@pytest.mark.parametrize(
    ("name", "made", "module"),
    [
        ("commands", commands_page.markdown, "rankscope.commands_page"),
        ("configuration", settings_page.markdown, "trainer.config.settings_page"),
    ],
)
def test_generated_pages_are_what_the_code_says(name: str, made: object, module: str) -> None:
    assert callable(made)
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page == made(), f"python -m {module} > docs/{name}.md"
