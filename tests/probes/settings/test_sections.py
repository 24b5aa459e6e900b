"""Sections that several packages read: values of any type, one default, and no raw reads anywhere else."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from probes.settings import described, sections
from probes.settings.section import read
from probes.settings.sections import ProbesSettings, ProfilerSettings, PublishSettings, RecoverySettings
from trainer.config.config import Config

ROOT = Path(__file__).parents[3]
SECTIONS = [found for name in sections.__all__ if isinstance(found := getattr(sections, name), type)]
ALL = [*SECTIONS, *(getattr(described, name) for name in described.__all__)]
# module -> why it handles the configuration as a whole, of whatever keys
WHOLE = {
    "probes/settings/section.py": "the reader",
    "probes/tape/redaction/secrets.py": "takes secrets out of every section",
    "probes/attach/retention_line.py": "hands the configuration to the reader",
    "analyzers/compare/two_runs.py": "compares all settings of two runs",
    "analyzers/fleet/run_speed.py": "compares the settings of a fleet's runs by name",
    "analyzers/report/html/diagnosis_page.py": "lists all settings",
    "analyzers/settings/analyze.py": "asks whether there is a configuration",
    "dashboard/views/system.py": "lists all settings",
    "dashboard/views/configuration.py": "lists all settings",
    "watch/exporting/trackers/feed.py": "sends all settings to a tracker",
    "rankscope/commands/export.py": "builds the trainer's configuration",
}


@pytest.mark.parametrize("settings", ALL)
@pytest.mark.parametrize("odd", [None, 3, [], "x", {"config": None}, {"config": {"SECTION": 7}}])
def test_a_damaged_manifest_has_the_defaults(settings: Any, odd: Any) -> None:
    manifest = odd if isinstance(odd, dict) else {"config": odd}
    if isinstance(manifest["config"], dict):
        manifest = {"config": {settings.section: 7}}
    assert read(settings, manifest) == settings()


@pytest.mark.parametrize("settings", ALL)
@pytest.mark.parametrize("odd", [None, [], {}, "", float("nan"), -1, True, ["a"]])
def test_a_value_that_does_not_fit_leaves_the_others(settings: Any, odd: Any) -> None:
    given = {field.name: odd for field in dataclasses.fields(settings)}
    found = read(settings, {"config": {settings.section: given | {"unknown": 1}}})
    for field in dataclasses.fields(settings):
        value = getattr(found, field.name)
        is_default = value == field.default and type(value) is type(field.default)
        assert is_default or value == odd or value == tuple(odd), field.name


def test_values_are_read_as_the_types_of_their_fields() -> None:
    given = {"grace_s": 7, "on_xid": "replace", "straggler_speedup": 1.0, "startup_s": float("inf"), "enabled": 0}
    found = read(RecoverySettings, {"config": {"recovery": given}})
    assert found == RecoverySettings(grace_s=7.0, on_xid="replace")
    assert isinstance(found.grace_s, float)
    assert read(ProfilerSettings, {"config": {"profiler": {"ranks": [2, 3]}}}).ranks == (2, 3)
    assert read(ProbesSettings, {"config": {"probes": {"retain_s": 59}}}).retain_s == 3600.0
    assert read(PublishSettings, {"config": {"publish": {"every_s": 0.5}}}).every_s == 10.0


@pytest.mark.parametrize("settings", SECTIONS)
def test_the_trainer_has_the_same_defaults_and_limits(settings: Any) -> None:
    config = type(getattr(Config(), settings.section))
    for field in dataclasses.fields(settings):
        if (settings.section, field.name) == ("recovery", "on_xid"):
            continue  # the trainer can restart ranks: `exclude`, where a run that sets nothing has `report`
        of_trainer = config.model_fields[field.name]
        default = of_trainer.get_default(call_default_factory=True)
        assert (tuple(default) if isinstance(default, list) else default) == field.default, field.name
        limits = {
            name: getattr(limit, name) for limit in of_trainer.metadata for name in ("ge", "gt", "le")
            if hasattr(limit, name)
        }  # fmt: skip
        assert limits == dict(field.metadata), field.name


def raw_reads(tree: ast.AST) -> list[int]:
    """Lines with `x.get("config")` or `x["config"]`."""
    found = []
    for node in ast.walk(tree):
        key = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            key = node.args[0]
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice
        if isinstance(key, ast.Constant) and key.value == "config":
            found.append(node.lineno)
    return found


def test_raw_reads_are_found() -> None:
    assert sorted(raw_reads(ast.parse("a = m.get('config', {}).get('x')\nb = m['config']\nm['config'] = 1\n"))) == [
        1,
        2,
    ]


def test_no_module_below_the_trainer_reads_the_configuration_raw() -> None:
    found = set()
    for package in ("probes", "store", "analyzers", "watch", "dashboard", "rankscope"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if re.search(r"""["']config["']""", text) and raw_reads(ast.parse(text)):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {*WHOLE}
