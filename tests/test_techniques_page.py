"""docs/techniques.md: each technique has code and a test that sets its settings, or a section that says why it is not
offered; what runs only on CUDA is refused elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.config.config import Config
from trainer.config.load import ConfigError
from trainer.config.machine import check_machine

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "techniques.md").read_text(encoding="utf-8")
ROWS = [line.removeprefix("- ") for line in PAGE.splitlines() if line.startswith("- ")]
_PATH = re.compile(r"`([\w/]+\.py)`")
_SETTING = re.compile(r"`([a-z]+)\.([a-z0-9_]+)`")
_REFUSAL = re.compile(r": \[not offered\]\(([\w-]+\.md)#([\w-]+)\)$")


def is_set(section: str, name: str, tests: str) -> bool:
    """True if the text of the tests gives the setting a value; its name in an import or a title is not enough."""
    return re.search(rf'{section}\.{name}=|"{name}":|\b{name}=(?!=)|\("{name}",', tests) is not None


@pytest.mark.parametrize("row", ROWS, ids=[row.partition(":")[0] for row in ROWS])
def test_a_technique_is_there_or_refused(row: str) -> None:
    if refusal := _REFUSAL.search(row):
        assert (ROOT / "docs" / refusal[1]).exists()
        assert not _PATH.findall(row)
        return
    paths = _PATH.findall(row)
    assert any(path.startswith("tests/") for path in paths)
    assert any(not path.startswith("tests/") for path in paths)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    defaults = Config().model_dump()
    named = [name for name in _SETTING.findall(row) if name[1] != "py"]
    assert [f"{section}.{name}" for section, name in named if name not in defaults[section]] == []
    tests = "".join((ROOT / path).read_text(encoding="utf-8") for path in paths if path.startswith("tests/"))
    assert [f"{section}.{name}" for section, name in named if not is_set(section, name, tests)] == []


@pytest.mark.parametrize(
    ("section", "name"),
    [name for row in ROWS if "CUDA only" in row for name in _SETTING.findall(row) if name[1] != "py"],
)
def test_what_is_for_cuda_only_is_refused_elsewhere(section: str, name: str) -> None:
    used = {bool: [True], str: ["all", "optimizer"]}[type(Config().model_dump()[section][name])]
    for value in used:
        with pytest.raises(ConfigError, match=rf"{section}.{name} = .*: needs"):
            check_machine(Config.model_validate({section: {name: value}}), has_gpu=False)


def test_the_page_has_all_its_rows() -> None:
    assert len(ROWS) >= 40


def test_paths_on_the_page_of_what_is_not_offered_exist() -> None:
    text = (ROOT / "docs" / "not-offered.md").read_text(encoding="utf-8")
    assert [path for path in _PATH.findall(text) if not (ROOT / path).is_file()] == []
