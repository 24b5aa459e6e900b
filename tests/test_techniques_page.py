"""docs/techniques.md: each technique has code and a test that exist, or a section that says why it is not offered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.config.config import Config

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| technique")
]
_PATH = re.compile(r"`([\w/]+\.py)`")
_SETTING = re.compile(r"`([a-z]+)\.([a-z0-9_]+)`")
_REFUSAL = re.compile(r"\[not offered\]\(([\w-]+\.md)#([\w-]+)\)")


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_technique_is_there_or_refused(row: list[str]) -> None:
    _, settings, code, tests = row
    if refusal := _REFUSAL.fullmatch(code):
        assert (settings, tests) == ("", "")
        assert (ROOT / "docs" / refusal[1]).exists()
        return
    files, proofs = _PATH.findall(code), _PATH.findall(tests)
    assert files
    assert proofs
    assert all(path.startswith("tests/") for path in proofs)
    assert [path for path in (*files, *proofs) if not (ROOT / path).is_file()] == []
    defaults = Config().model_dump()
    named = _SETTING.findall(settings)
    assert [f"{section}.{name}" for section, name in named if name not in defaults[section]] == []


def test_the_page_has_all_its_rows() -> None:
    assert len(ROWS) >= 40


def test_paths_on_the_page_of_what_is_not_offered_exist() -> None:
    text = (ROOT / "docs" / "not-offered.md").read_text(encoding="utf-8")
    assert [path for path in _PATH.findall(text) if not (ROOT / path).is_file()] == []
