"""Settings of an attached run."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from probes.attach import attach as attach_module
from probes.attach import attached_config as attached_config_module
from probes.attach.attached_config import VARIABLE, attached_config
from probes.fail_open import error_counts
from probes.recorder import NullRecorder


def test_attaching_does_not_enable_killing_ranks() -> None:
    assert attached_config({})["recovery"] == {"enabled": False}
    assert attached_config({"recovery": {"grace_s": 5}})["recovery"] == {"enabled": False, "grace_s": 5}
    assert attached_config({"recovery": {"enabled": True}})["recovery"] == {"enabled": True}


def test_the_launcher_overrides_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"publish": {"address": "file:///lake"}, "probes": {"retain": "all"}}))
    config = attached_config({"publish": {"address": "s3://mine", "every_s": 3}, "lr": 0.1})
    assert config["publish"] == {"address": "file:///lake", "every_s": 3}
    assert (config["probes"], config["lr"]) == ({"retain": "all"}, 0.1)


@pytest.mark.parametrize(
    ("given", "kept", "words"),
    [
        ({"probes": {"retian": "window"}}, {"probes": {}}, ["probes.retian = 'window'", "did you mean retain"]),
        (
            {"probes": {"sync_s": "5", "health": False}},
            {"probes": {"health": False}},
            ["probes.sync_s = '5'", "number"],
        ),
        ({"alerts": {"command": "mail 'ops"}}, {"alerts": {}}, ["alerts.command = (redacted)", "not a command line"]),
        (
            {"alerts": {"comand": "curl -H token"}},
            {"alerts": {}},
            ["alerts.comand = (redacted)", "did you mean command"],
        ),
        ({"probes": {"budget_mb": 5}}, {"probes": {}}, ["probes.budget_mb needs probes.retain"]),
        ({"metrics": {"listen": "9400"}}, {"metrics": {}}, ["metrics.listen = '9400'", "HOST:PORT"]),
        ({"otel": 3, "lr": 0.1}, {"otel": {}, "lr": 0.1}, ["otel = 3"]),
        ({"recovery": {"enabled": "yes"}}, {"recovery": {"enabled": False}}, ["recovery.enabled = 'yes'"]),
    ],
)
def test_a_wrong_setting_is_named_and_has_the_default(
    caplog: pytest.LogCaptureFixture, given: dict[str, Any], kept: dict[str, Any], words: list[str]
) -> None:
    assert attached_config(given) == {"recovery": {"enabled": False}} | kept
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    told = record.getMessage()
    assert "attach(config=...)" in told
    assert all(word in told for word in words), told
    assert "token" not in told


def test_valid_settings_and_settings_of_the_script_stay(caplog: pytest.LogCaptureFixture) -> None:
    config = {"probes": {"retain": "window", "budget_mb": 5}, "trackers": {"to": []}, "model": {"layers": 3}}
    assert attached_config(config) == config | {"recovery": {"enabled": False}}
    assert not caplog.records


def test_only_one_rank_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert attached_config({"probes": {"retian": "window"}}, warn=False)["probes"] == {}
    assert not caplog.records


def test_a_check_that_fails_is_counted_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attached_config_module, "CHECK_S", 0.0)
    before = error_counts["attach.config"]
    assert attached_config({"probes": {"health": False}})["probes"] == {"health": False}
    assert error_counts["attach.config"] == before + 1


def test_a_config_that_comes_too_late_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attach_module, "_current", attach_module.Attached(NullRecorder(), None))
    with caplog.at_level(logging.WARNING):
        attach_module.attach(config={"lightning": {"version": "2"}})
        assert not caplog.records
        attach_module.attach(config={"publish": {"address": "s3://lake"}})
    assert "ignores publish" in caplog.text
    assert "rankscope run --set" in caplog.text
