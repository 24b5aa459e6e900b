"""Actions on modules that are imported later."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from probes.attach.patching.on_import import OnImport

NAME = "rankscope_imported_later"


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnImport]:
    (tmp_path / f"{NAME}.py").write_text("import os\nif 'FAILS' in os.environ:\n    raise ImportError\nvalue = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = OnImport()
    yield found
    found.remove()
    sys.modules.pop(NAME, None)


def test_an_action_runs_once_after_the_import(imports: OnImport) -> None:
    seen: list[ModuleType] = []
    imports.when(NAME, seen.append)
    module = importlib.import_module(NAME)
    assert seen == [module]
    assert module.value == 1
    importlib.reload(module)
    assert seen == [module]


def test_a_program_may_look_first_whether_the_module_is_installed(imports: OnImport) -> None:
    seen: list[ModuleType] = []
    imports.when(NAME, seen.append)
    assert importlib.util.find_spec(NAME) is not None
    module = importlib.import_module(NAME)
    assert seen == [module]


def test_an_import_that_failed_may_be_tried_again(imports: OnImport, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ModuleType] = []
    imports.when(NAME, seen.append)
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(ImportError):
        importlib.import_module(NAME)
    monkeypatch.delenv("FAILS")
    assert seen == []
    module = importlib.import_module(NAME)
    assert seen == [module]


def test_two_may_wait_for_one_module(imports: OnImport) -> None:
    seen: list[ModuleType] = []
    other = OnImport()
    try:
        imports.when(NAME, seen.append)
        other.when(NAME, seen.append)
        module = importlib.import_module(NAME)
        assert seen == [module, module]
    finally:
        other.remove()
