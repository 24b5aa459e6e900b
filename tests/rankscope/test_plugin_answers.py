"""Answers of plug-ins are checked where they arrive: a plug-in may change the modules that check them on its side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from analyzers import plugins as described
from analyzers.analysis import plugin_analyses
from analyzers.scope import Scope
from store.plugins.process import PluginError, PluginProcess, _installed, plugins
from store.readers.plugins.plugin_formats import read_by_plugin
from store.readers.untrusted.external_files import SourceError
from tests.rankscope.bad_plugins import BAD, Bad, install

READER = """
import store.readers.plugins.plugin_child as child
child.checked_rows = lambda found: found
def recognise(first): return first.startswith(b"#bad")
def read(path): return [tuple(ROW)]
"""
FORKS = "import os\ndef recognise(first):\n    os.fork()\n    return True\ndef read(path): return {}\n"
CLAIMS = """
import analyzers.plugin_calls.plugin_child as child
child.OUR_KINDS = frozenset()
KINDS = (Kind(name="straggler", title="Mine"), Kind(name="NAME", title="Mine"))
def run(source, scope): return [found(kind="straggler", summary="I am a straggler."), found()]
"""
Site = Callable[..., None]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Installs one plug-in for this test."""

    def installed(group: str, name: str, text: str) -> None:
        info = tmp_path / "bad-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rankscope.{group}]\n{name} = {name}\n")
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        _installed.cache_clear()
        plugins.cache_clear()
        described.installed.cache_clear()

    yield installed
    _installed.cache_clear()
    plugins.cache_clear()
    described.installed.cache_clear()


@pytest.mark.parametrize(
    "row",
    [
        ("steps", {"rank": 0, "duration_ns": 1}),
        ("steps", {"rank": -7, "step": 1}),
        ("steps", {"rank": 0, "step": 1, "duration_ns": "long"}),
        ("steps", [1]),
        ("log_events", {"kind": "no rule has this"}),
        ("events", {"kind": "x", "no_column": 1}),
    ],
    ids=str,
)
def test_rows_are_checked_where_they_arrive(site: Site, tmp_path: Path, row: object) -> None:
    site("readers", "changed", READER.replace("ROW", repr(row)))
    (tmp_path / "file.bad").write_text("#bad\n")
    with pytest.raises(SourceError, match="plug-in changed: its answer is not valid, and it was ended"):
        read_by_plugin(tmp_path / "file.bad", "file.bad")


def test_reasons_are_bounded(site: Site, tmp_path: Path) -> None:
    site("readers", "changed", READER.replace("[tuple(ROW)]", '[("refused", "x" * 10_000)] * 1_000'))
    (tmp_path / "file.bad").write_text("#bad\n")
    assert [len(reason) for reason in read_by_plugin(tmp_path / "file.bad", "file.bad").refused] == [500] * 5


def test_a_plug_in_that_answers_twice_is_ended(site: Site) -> None:
    site("readers", "forks", FORKS)
    (entry,) = entry_points(group="rankscope.readers", name="forks")
    plugin = PluginProcess(entry, "store.readers.plugins.plugin_child")
    assert plugin.call("recognise", b"")
    with pytest.raises(PluginError, match="it answered twice, and it was ended"):
        all(plugin.call("recognise", b"") for _ in range(20))  # the fork may take its time


def test_a_process_that_cannot_be_started_is_an_error_of_the_plug_in(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site("readers", "good", "def recognise(first): return True\ndef read(path): return {}\n")
    (entry,) = entry_points(group="rankscope.readers", name="good")
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(PluginError, match="its process cannot be started"):
        PluginProcess(entry, "store.readers.plugins.plugin_child").call("recognise", b"")


def test_a_finding_of_a_built_in_kind_is_refused(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BAD, "claims", Bad(body=CLAIMS, reason=""))
    install(tmp_path / "written")
    site("analyzers", "claims", (tmp_path / "written" / "claims.py").read_text())
    (analysis,) = plugin_analyses()
    assert analysis.kinds == ("claims",)
    found = analysis.run(None, Scope(attempt=0))  # type: ignore[arg-type]
    assert [(one.kind, one.summary) for one in found] == [
        ("claims", "I am claims (plug-in claims)."),
        ("records", "Plug-in claims: refused a finding: kind 'straggler' is not one of its kinds (claims)."),
    ]
